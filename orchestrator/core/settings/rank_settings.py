"""Settings of NCCL, gloo and torch for the ranks of a node, each with its reason: facts and wishes in, settings out. Pure.

Rules: what the user, the submitter's shell, the host or the setup lines have set stands. Equal nodes get equal settings
in every attempt, so that numbers can be reproduced. What NCCL chooses well by itself is not set, and `orch plan` says so.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.core.settings.hardware_facts import HardwareFacts
from orchestrator.core.text import counted

RECORDED = "2000"
"""How many collectives torch's flight recorder keeps; torch's own default, but older releases come with it switched off."""

WATCHDOG_S = 1800
"""The least time before torch's watchdog aborts a rank whose watchdog thread is stuck; torch's own is 480 s."""

RANK_MARK = "{rank}"
"""Stands in a value for the number of the rank, which the agent puts there."""

_OTHER_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Variables that torch has renamed, each with its earlier name: the node's torch is not known before the start."""

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "KMP_", "MKL_", "GOMP_", "FI_", "UCX_")
_WATCHED = frozenset(
    ("PYTHONUNBUFFERED", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG")
)


def is_watched(name: str) -> bool:
    """Tell whether a variable bears on how NCCL, gloo and torch run."""
    return name.startswith(_PREFIXES) or name in _WATCHED


class SetBy(enum.Enum):
    """Who has set a variable."""

    ORCH = "orch"
    # In the job file or on the command line
    YOU = "you"
    # The environment that the job was submitted with
    SHELL = "your shell"
    HOST = "the host"
    SETUP = "setup lines"
    # orch, but when the attempt starts
    LATER = "orch, at the start"
    # Not set: the library chooses
    LIBRARY = "not set"


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable of the ranks' environment; `value` is None where it is not set, or not known yet."""

    name: str
    value: str | None
    set_by: SetBy
    reason: str

    @property
    def text(self) -> str:
        """The setting in one line."""
        shown = f"{self.name}={self.value}" if self.value is not None else self.name
        return " ".join(f"{shown} ({self.set_by.value}: {self.reason})".split())  # a value may have lines


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What a job wants of a node, as far as settings follow from it."""

    backend: str = "local"
    nodes: int = 1
    # On this node, and of the job on this host: on backend local every node is on it
    ranks: int = 1
    ranks_on_host: int = 1
    # Those of the job on this node; 0: CPU ranks
    gpus: int = 0
    # Over SSH: for how many CPU ranks the host counts; 0: one for each CPU
    slots: int = 0
    # The interface over which the node reaches the first one; empty: not known; None: found when the attempt starts
    interface: str | None = ""
    # The attempt's folder for evidence, as the node sees it
    evidence: str = "evidence"
    # How long orch may watch a silent job before it judges
    patience_s: float = 0.0
    # Variables that other fields of the job file stand for, unless anything else sets them
    defaults: dict[str, str] = field(default_factory=dict)
    # Where in the job file each variable of the user stands
    chosen: dict[str, str] = field(default_factory=dict)
    # The names of variables whose values are never shown
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Environments:
    """The environments that a rank's is made of: the host's, what the job adds, and the sum, after the setup lines."""

    host: Mapping[str, str]
    added: Mapping[str, str]
    sum: Mapping[str, str]

    def origin(self, name: str, chosen: Mapping[str, str]) -> tuple[SetBy, str]:
        """Return who has set a variable of the sum, and where."""
        value = self.sum[name]
        if self.added.get(name) == value:
            return (
                (SetBy.YOU, chosen[name])
                if name in chosen
                else (SetBy.SHELL, "it was set where you submitted")
            )
        if self.host.get(name) == value:
            return SetBy.HOST, "it is set in the host's environment"
        return SetBy.SETUP, "the setup lines of the job file set it"


def settings(facts: HardwareFacts | None, request: RankRequest, given: Environments) -> tuple[Setting, ...]:
    """Return the settings of a node's ranks: those that orch decides, then others that are set, then what is left alone.

    `facts` are None for a node that is not known yet.
    """
    decided = [
        _threads(facts, request), *_interfaces(request), *_flight_recorder(request), _watchdog(request),
        Setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", SetBy.ORCH, "a failed collective ends its rank, as under torchrun"),
        *_nccl_log(request, given.sum), *_defaults(request),
    ]  # fmt: skip
    here = [_as_given(setting, request, given) for setting in decided]
    names = {setting.name for setting in here}
    others = sorted(name for name in given.sum if is_watched(name) and name not in names)
    here += [_given(name, request, given) for name in others]
    untouched = [one for one in _left_alone(facts, request, given.sum) if one.name not in given.sum]
    return (*here, *untouched)


def to_set(decided: tuple[Setting, ...], rank: int) -> dict[str, str]:
    """Return the variables that orch adds to the environment of one rank."""
    return {
        one.name: one.value.replace(RANK_MARK, f"{rank:05d}")
        for one in decided
        if one.set_by is SetBy.ORCH and one.value is not None
    }


def _as_given(setting: Setting, request: RankRequest, given: Environments) -> Setting:
    """Return the setting as it stands where something else has set it, by this name or torch's other one."""
    if setting.name in given.sum:
        return _given(setting.name, request, given)
    pairs = {**_OTHER_NAMES, **{old: new for new, old in _OTHER_NAMES.items()}}
    twin = pairs.get(setting.name, "")
    if twin in given.sum and setting.set_by is SetBy.ORCH:
        return Setting(setting.name, given.sum[twin], SetBy.ORCH, f"as {twin}: torch has both names for it")
    return setting


def _given(name: str, request: RankRequest, given: Environments) -> Setting:
    set_by, where = given.origin(name, request.chosen)
    value = given.sum[name] if name not in request.secrets else "(secret)"
    return Setting(name, value, set_by, where)


# What orch decides


def _threads(facts: HardwareFacts | None, request: RankRequest) -> Setting:
    """Return the number of threads: the rank's share of the host's cores, so that ranks never compete for them.

    torchrun gives every rank one thread. Where other jobs may come to the host, the share is counted by what a rank leases
    of it, a GPU or a slot; then it is the same whether they are there or not.
    """
    if facts is None:
        reason = f"the cores of the node, shared by {counted(request.ranks_on_host, 'rank')}"
        return Setting("OMP_NUM_THREADS", None, SetBy.LATER, reason)
    cores = facts.cores
    what = counted(cores, "core")
    if facts.quota_cpus is not None and facts.quota_cpus < cores:
        cores, what = math.floor(facts.quota_cpus), f"a cgroup's limit of {facts.quota_cpus:g} CPUs"
    if request.backend == "slurm" and facts.slurm_cpus is not None and facts.slurm_cpus <= cores:
        cores, what = facts.slurm_cpus, f"{counted(facts.slurm_cpus, 'CPU')} from Slurm"
    if request.backend == "ssh" and not request.gpus:
        sharers = request.slots or facts.cpus
        words = f"{counted(sharers, 'slot')} of the host, {'as hosts_file says' if request.slots else 'one for each CPU'}"
    elif request.backend != "slurm" and request.gpus and len(facts.gpus) >= request.ranks_on_host:
        sharers, words = len(facts.gpus), f"{counted(len(facts.gpus), 'GPU')} of the host"
    else:
        sharers, words = request.ranks_on_host, f"{counted(request.ranks_on_host, 'rank')} of the job here"
    threads = max(1, cores // max(1, sharers))
    return Setting("OMP_NUM_THREADS", str(threads), SetBy.ORCH, f"{what} shared by {words}")


def _interfaces(request: RankRequest) -> list[Setting]:
    """Return the settings that make gloo and NCCL use the interface over which nodes reach each other.

    NCCL takes a bare name for the beginning of a name, and `=` before it for the whole name.
    """
    names, name = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), request.interface
    if name is None:
        reason = "the interface over which every node reaches the first one, which they try out before the ranks start"
        return [Setting(one, None, SetBy.LATER, reason) for one in names]
    if not name:
        return []
    is_loopback = name == "lo"
    reason = "all ranks are on this machine" if is_loopback else "over it this node reaches the other nodes"
    values = (name, name if is_loopback else f"={name}")
    return [Setting(one, value, SetBy.ORCH, reason) for one, value in zip(names, values, strict=True)]


def _flight_recorder(request: RankRequest) -> list[Setting]:
    both = "; under its new name and its earlier one"
    on = f"torch records its last collectives, from which orch tells which rank a hang waits for{both}"
    dump = f"where torch leaves that record when it gives up by itself; it adds the rank{both}"
    values = (RECORDED, on), (f"{request.evidence}/torch-trace-of-rank-", dump)
    stacks = (
        "a stack for each record is taken under Python's lock, and a dump could wait for that without end"
    )
    recorder = [
        Setting(name, value, SetBy.ORCH, reason)
        for names, (value, reason) in zip(_OTHER_NAMES.items(), values, strict=True)
        for name in names
    ]
    return [*recorder, Setting("TORCH_INCLUDE_STACK_TRACE", "0", SetBy.ORCH, stacks)]


def _watchdog(request: RankRequest) -> Setting:
    """Return how long torch's own watchdog waits: longer than orch, so that a hang is judged before the rank is gone.

    The limits of collectives, 600 s or 1800 s, are arguments in the script: not ours to set.
    """
    wait_s = max(WATCHDOG_S, math.ceil(2 * request.patience_s))
    reason = "torch must not abort a rank before orch has judged a hang"
    return Setting("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(wait_s), SetBy.ORCH, reason)


def _nccl_log(request: RankRequest, environ: Mapping[str, str]) -> list[Setting]:
    """Return the settings that keep NCCL's warnings in a file of each rank; none where the log is the user's business."""
    if "NCCL_DEBUG" in environ:
        return []
    file = f"{request.evidence}/rank-{RANK_MARK}-nccl.log"
    return [
        Setting("NCCL_DEBUG", "WARN", SetBy.ORCH, "NCCL says why it fails, and nothing else"),
        Setting("NCCL_DEBUG_FILE", file, SetBy.ORCH, "apart from the output of your script"),
    ]


def _defaults(request: RankRequest) -> list[Setting]:
    reasons = {"PYTHONUNBUFFERED": "lines appear in the log when they are printed (logs.unbuffered)"}
    return [
        Setting(name, value, SetBy.ORCH, reasons.get(name, "as the job's plan has it"))
        for name, value in request.defaults.items()
    ]


# What is left alone, and why


def _left_alone(
    facts: HardwareFacts | None, request: RankRequest, environ: Mapping[str, str]
) -> list[Setting]:
    if not request.gpus or facts is None:
        return []
    network = _network(facts) if request.nodes > 1 and request.backend != "local" else []
    links = f" ({facts.gpu_links})" if facts.gpu_links else ""
    reason = f"NCCL finds NVLink, PCIe and shared memory between GPUs by itself{links}"
    return [*network, _alone("NCCL_P2P_LEVEL", reason), _binding(facts, environ)]


def _network(facts: HardwareFacts) -> list[Setting]:
    """Return what is known of InfiniBand and RoCE: NCCL uses every active port, and no other."""
    active = [port for port in facts.rdma if port.state == "ACTIVE"]
    if not active:
        down = f" ({', '.join(f'{one.device} is {one.state}' for one in facts.rdma)})" if facts.rdma else ""
        return [
            _alone(
                "NCCL_IB_DISABLE", f"no InfiniBand or RoCE port is active{down}: NCCL uses sockets by itself"
            )
        ]
    kinds = ", ".join(
        f"{one.device} {'RoCE' if one.roce else 'InfiniBand'} {_rate(one.rate)}" for one in active
    )
    rest = [f"{one.device} is {one.state}" for one in facts.rdma if one not in active]
    passed = f"; it passes over the others ({', '.join(rest)})" if rest else ""
    found = [_alone("NCCL_IB_HCA", f"NCCL uses every active port by itself: {kinds}{passed}")]
    if any(one.roce for one in active):
        reason = "NCCL 2.21 and later find the GID of RoCE by themselves; for an older one ask who runs the network"
        found.append(_alone("NCCL_IB_GID_INDEX", reason))
    return found


def _rate(rate: str) -> str:
    return rate.partition(" (")[0].replace("Gb/sec", "Gb/s")


def _binding(facts: HardwareFacts, environ: Mapping[str, str]) -> Setting:
    """Return why ranks are bound to no cores: a wrong binding costs far more than a right one gains."""
    reason = "ranks are not bound to cores: that would bind their DataLoader workers, too; NCCL binds its own threads"
    if "SLURM_CPU_BIND" in environ or facts.slurm_cpus is not None:
        return _alone("CPU affinity", f"{reason}, and Slurm binds the node's task")
    of_node: dict[int, int] = {}
    for gpu in facts.gpus:
        if gpu.numa is not None:
            of_node[gpu.numa] = of_node.get(gpu.numa, 0) + 1
    if len(facts.numa) > 1 and of_node:
        cpus = {node.number: node.cpus for node in facts.numa}
        near = (
            f"{counted(count, 'GPU')} near CPUs {cpus.get(node, '?')}"
            for node, count in sorted(of_node.items())
        )
        reason = f"{reason} ({'; '.join(near)}: `command: numactl …` binds them)"
    return _alone("CPU affinity", reason)


def _alone(name: str, reason: str) -> Setting:
    return Setting(name, None, SetBy.LIBRARY, reason)
