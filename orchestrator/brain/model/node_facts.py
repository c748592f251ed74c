"""Facts about nodes: the agent on each, what it was ordered and has done, and how it failed."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from orchestrator.brain.model import decisions as d
from orchestrator.core import observations
from orchestrator.core.errors import Fault

LAUNCH_FAILURES_MAX = 3
"""How often the first agent of a node may fail to start before the job says that it cannot be launched."""


GPU_FIX = "see nvidia-smi -q there; reset the GPU or reboot the host"
"""The fix of a host with a sick GPU."""


class AgentState(enum.Enum):
    """Observed state of a node's agent."""

    ABSENT = "absent"
    LAUNCHING = "launching"
    UP = "up"
    SILENT = "silent"


@dataclass(slots=True)
class Orders:
    """What a node's agent was ordered: the latest attempt of each order, 0 for none.

    The end of a connection voids them all, since they may never have arrived; they are given again when it is back.
    """

    prepare: int = 0
    probe: int = 0
    start: int = 0
    stop: int = 0
    stop_at: float = 0.0
    leave: bool = False


@dataclass(slots=True)
class RendezvousFacts:
    """What a node has reported for the rendezvous of the current attempt."""

    # Where ranks meet if this is the first node: the address from the plan and the port that it found free.
    address: str = ""
    port: int = 0
    # Its addresses to choose from; empty where the plan fixes the address.
    addresses: tuple[observations.Address, ...] = ()
    # The attempt in which it has probed the first node, which addresses of that one it reached, and how others failed.
    probed: int = 0
    reached: tuple[observations.ReachableAddress, ...] = ()
    probe_failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SetupFailure:
    """Setup lines that failed, or a program that cannot be started, with the end of their output. `save`: the number of a
    checkpoint that is incomplete there, 0 for another reason."""

    reason: str
    tail: str
    save: int = 0
    is_final: bool = False
    fix: str = ""


@dataclass(frozen=True, slots=True)
class ScriptEnd:
    """How a node's script ended: with `code` (negative: a signal) after this many launcher calls, and its last lines."""

    calls: int
    code: int
    tail: str


@dataclass(frozen=True, slots=True)
class AgentLoss:
    """How and when (job clock) an agent was lost while it had ranks of the current attempt."""

    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class HostBusy:
    """Who used a host at the last try to start an agent there, and when (job clock) that was."""

    reason: str
    at: float


@dataclass(slots=True)
class NodeFacts:
    """One node. Attempts are numbers, 0 for none; `ordered` are wishes, the rest was observed."""

    name: str
    # Global ranks on it: fixed by the plan, or by `Place` for one attempt.
    ranks: tuple[int, ...]

    # The agent. `agent_present`: one was up that has neither left nor been seen to have died.
    agent_state: AgentState = AgentState.ABSENT
    agent_present: bool = False
    incarnation: str = ""
    contact_at: float = 0.0
    ordered: Orders = field(default_factory=Orders)

    # How long the agent may continue without contact: the longest timeout that it was given, the same for the time before
    # the first step of its ranks in the current attempt, and whether a connection ended since; see `fence`.
    fence_s: float = 0.0
    startup_timeout_s: float = 0.0
    is_fence_uncertain: bool = False

    # Whether the node can be used. Launches that failed in a row and why the last one did; what a person must fix first;
    # how it was lost in an earlier attempt, as long as it has not come back; who else uses it.
    launched_at: float = 0.0
    launch_failures: int = 0
    launch_fault: Fault | None = None
    excluded: Fault | None = None
    lost_earlier: str = ""
    host_busy: HostBusy | None = None

    # The latest attempt that it is set up for, whose ranks were started, of which nothing runs on it any more (and since
    # when), and for which a `Start` was ever sent: only later attempts are certain to have left nothing.
    ready_attempt: int = 0
    started_attempt: int = 0
    cleared_attempt: int = 0
    cleared_at: float = 0.0
    may_run_attempt: int = 0

    # Of the current attempt. `inspected`: the last inspection that it has answered.
    rendezvous: RendezvousFacts = field(default_factory=RendezvousFacts)
    inspection_answered: int = 0
    # The launcher call that its script has come to, when (job clock) that was, and how the script ended.
    launcher_call: int = 0
    launcher_call_at: float = 0.0
    script_end: ScriptEnd | None = None
    setup_failure: SetupFailure | None = None
    agent_loss: AgentLoss | None = None

    # Its GPUs of which something is to be said, by its present agent; the others are healthy.
    gpus: tuple[observations.GpuState, ...] = ()

    @property
    def script_ended_well(self) -> bool:
        """Whether its script has ended with code 0."""
        return self.script_end is not None and self.script_end.code == 0

    @property
    def is_excluded_for_gpu(self) -> bool:
        """Whether it is excluded for a sick GPU only: it is used again if there are too few others."""
        return self.excluded is not None and self.excluded.fix == GPU_FIX

    @property
    def is_unlaunchable(self) -> bool:
        """Whether no agent can be started here. Where one has been up before, the host may be rebooting."""
        return self.launch_failures >= LAUNCH_FAILURES_MAX and not self.incarnation

    def loss_reason(self, verdict: d.Verdict | None) -> str:
        """Return how the node was lost in the current attempt, by its verdict too; empty if it was not."""
        if self.agent_loss is not None:
            return self.agent_loss.reason
        if verdict is None or verdict.kind is not d.VerdictKind.NODE_LOST or verdict.node != self.name:
            return ""
        return next((piece.text for piece in verdict.proof if piece.node == self.name), "")

    def clear_faults(self) -> None:
        """Forget why the node could not be used: the user has resumed the job, or there is a new allocation."""
        if not self.agent_present:
            self.incarnation = ""  # that it was up in an earlier run says nothing of now
        self.launch_failures, self.launch_fault = 0, None
        self.excluded, self.lost_earlier, self.host_busy = None, "", None

    def is_clear(self, attempt: int) -> bool:
        """Return whether nothing of `attempt` can be running here."""
        return self.cleared_attempt >= attempt or self.may_run_attempt < attempt
