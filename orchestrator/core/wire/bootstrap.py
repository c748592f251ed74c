"""Messages between a host and the launching side before there is an agent: requests go in, replies come out.

A request is one line of JSON on the standard input of the node's launch script; raw bytes follow when a `SendBlob` asks
for them, and the line `GO` after `Leased`. A reply is a line `<sentinel> <json>` on standard output, wherever in the line
it begins; everything else there is noise, such as what a login shell prints. The sentinel is new for each launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.core.host_facts import AllReduced, HardwareFacts, HostFacts, Link, SourceFile
from orchestrator.core.observations import Address
from orchestrator.core.wire.agent_config import AgentConfig

GO = b"go"
"""The line after which an agent monitor that holds its leases starts its agent; without it, it ends."""

GO_S_MAX = 15.0
"""How long an agent monitor waits for it; by then its launcher has vanished."""

REPLY_BYTES_MAX = 1 << 20
STEP_BYTES_MAX = 4 << 20
STEP_S_MAX = 400
"""How long a surveyed host waits for the next step of a check, and how long a step may take."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that may have to be sent: `SendBlob` asks for them only when the host has none with this hash."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Request:
    """Common fields of requests: only these are read before the bundle is on the host."""

    # The job's folder; may begin with `~`, which the host resolves
    root: str
    bundle: Blob


@dataclass(frozen=True, slots=True)
class LaunchAgent(_Request):
    """Start the agent of `config`."""

    code: Blob
    # The size of the code archive once unpacked
    unpacked_bytes: int
    config: AgentConfig


@dataclass(frozen=True, slots=True)
class QueryAgent(_Request):
    """Report on the agent of `node`; from now on it dials `endpoint` (`host:port`; empty: leave that as it is)."""

    node: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class CleanUp(_Request):
    """Stop leftover processes of an ended job on this host, and remove its folder, unless that is the submitter's own."""

    job: str


@dataclass(frozen=True, slots=True)
class SurveyHost(_Request):
    """Report the host's resources for a job, and leave nothing. `programs`: the first that exists runs the ranks.

    Steps of a check may follow, a line each, until the input ends.
    """

    programs: tuple[str, ...]


HostRequest: TypeAlias = LaunchAgent | QueryAgent | CleanUp | SurveyHost


# Steps of a check, after the survey


@dataclass(frozen=True, slots=True)
class GatherFacts:
    """Report the node's facts. `own_modules`: top-level modules of the job's own code, which is not on the host."""

    # Empty: no Python of the ranks is asked
    program: str
    env: dict[str, str]
    sources: tuple[SourceFile, ...]
    own_modules: tuple[str, ...]
    folders: tuple[str, ...]
    names: tuple[str, ...]
    counts_gpus: bool


@dataclass(frozen=True, slots=True)
class OpenPorts:
    """Listen where ranks would, on `port` (None: one that is free) and on one that the kernel chooses."""

    token: str
    port: int | None


@dataclass(frozen=True, slots=True)
class MeasurePeer:
    """Dial another node's ports, and send to it for `send_s`."""

    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    token: str
    send_s: float


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Take part in an all-reduce with other nodes, and measure its speed for `burn_s`. Rank 0 listens at `address` and `port`.
    With a world of 0: the round `rank` of a burn-in of this node alone instead, for so long, with a file in `folder` or the
    nearest folder above it."""

    rank: int
    world: int
    address: str
    port: int
    program: str
    env: dict[str, str]
    on_gpu: bool
    burn_s: float = 0.0
    folder: str = ""


CheckStep: TypeAlias = GatherFacts | OpenPorts | MeasurePeer | AllReduce


# Replies


@dataclass(frozen=True, slots=True)
class InShell:
    """The login shell runs the script."""


@dataclass(frozen=True, slots=True)
class PythonFound:
    """A suitable Python. `clock_s`: the host's time, in seconds since 1970."""

    path: str
    version: str
    clock_s: float


@dataclass(frozen=True, slots=True)
class SendBlob:
    """Send the bytes of `bundle` or `code` now."""

    what: str


@dataclass(frozen=True, slots=True)
class Working:
    """Something slow is in progress, such as unpacking, or waiting for another launch in the same folder."""

    at: str


@dataclass(frozen=True, slots=True)
class FolderReady:
    """The job's folder is ready to be filled. `notes`: warnings for later."""

    root: str
    ships: bool
    has_rsync: bool
    boot_id: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FilesVerified:
    """Bundle and code are on the host, and verified."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The agent monitor holds what its agent needs, and waits for `GO`."""

    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AlreadyUp:
    """The node's agent lives since an earlier launch, and will dial. `gpus` are those that it has leased."""

    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AgentMonitorUp:
    """The agent monitor has received its `GO`, and runs without the launcher."""

    pid: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The launch ends here. `trouble` is one of `transient`, `permanent`, `busy`."""

    stage: str
    reason: str
    fix: str
    trouble: str


class RequestFailed(Exception):
    """A request that the host cannot fulfil, with the reply to send."""

    def __init__(self, stage: str, reason: str, fix: str = "", trouble: str = "permanent") -> None:
        super().__init__(reason)
        self.reply = Failed(stage, reason, fix, trouble)


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """State of the node's agent; `boot_id`: of the host's kernel; `last_line`: the last line of its log."""

    alive: bool
    boot_id: str
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class CleanedUp:
    """A clean-up is over. `kept_reason`: why a folder stays that should have gone; empty for none."""

    kept_reason: str


@dataclass(frozen=True, slots=True)
class HeldLeases:
    """GPUs or slots of a host that a job holds: how many, which (`slots 0-3`), who (`job a-1 of ann, pid 12`), for how long."""

    count: int
    names: str
    holder: str
    for_s: float | None = None

    def __str__(self) -> str:
        return f"{self.names} held by {self.holder}"


@dataclass(frozen=True, slots=True)
class HostSurveyed:
    """Resources of a host for a job."""

    root: str
    # Why the job's folder cannot be made, empty where it can; and what to do
    fault: str
    fix: str
    free_bytes: int
    noexec: bool
    cores: int
    gpus: tuple[str, ...]
    interfaces: tuple[str, ...]
    has_rsync: bool
    # The program that would run the ranks, empty when the host has none of those asked for
    program: str
    hardware: HardwareFacts = field(default_factory=HardwareFacts)
    held: tuple[HeldLeases, ...] = ()


@dataclass(frozen=True, slots=True)
class PortsOpened:
    """The ports that are listened on: the rendezvous's and another; `fault`: why they are not."""

    ports: tuple[int, ...]
    addresses: tuple[Address, ...]
    fault: str


Reply: TypeAlias = (
    InShell
    | PythonFound
    | SendBlob
    | Working
    | FolderReady
    | FilesVerified
    | Leased
    | AlreadyUp
    | AgentMonitorUp
    | Failed
    | AgentStatus
    | CleanedUp
    | HostSurveyed
    | HostFacts
    | PortsOpened
    | Link
    | AllReduced
)
