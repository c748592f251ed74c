"""Nodes, pool and limits of a job: the part of its plan that the brain decides by. Pure data.

The rest of the plan stays out of the journal: it is long, and of no use to the brain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

Gang: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The nodes of an attempt in the order of their ranks, each with its ranks."""


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One node: its place in the job, its host, and what it uses of the host.

    With a pool it is a host that may be used: `Place` gives it ranks in an attempt, and its GPUs are leased when it is used.
    """

    name: str
    host: str
    # Where other hosts reach it; empty: to be probed
    address: str
    gpus: tuple[int, ...]
    ranks: tuple[int, ...]
    # How many CPU ranks it takes; 0: as many as it has cores
    slots: int = 0


@dataclass(frozen=True, slots=True)
class QueueTerms:
    """Terms of a job in a queue system, whose nodes are an allocation and which can be requeued.

    `grace_s`: how long ranks may take to save when the allocation is about to end.
    """

    requeues_at_time_limit: bool
    grace_s: float


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """Hosts that an attempt takes: nodes, the ranks and GPUs of each, and spares. 0 GPUs: CPU ranks."""

    nodes: int
    ranks_each: int
    gpus_each: int
    spares: int
    # Spreads the tries of jobs that compete for the same hosts
    seed: int = 0
    # The nodes are those of the present allocation of a queue system
    queue: QueueTerms | None = None
    # Spares are prepared along with the ranks, and not only when they are needed
    readies_spares: bool = True

    def node_ranks(self, index: int) -> tuple[int, ...]:
        """Return the ranks of the node at a place of the gang."""
        return tuple(range(index * self.ranks_each, (index + 1) * self.ranks_each))


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit of a job. None means no limit, unless a field says otherwise."""

    FORMER: ClassVar[dict[str, str]] = {
        "hang_floor_s": "", "hang_ceiling_s": "", "hang_patience_s": "", "away_fence_s": "disconnected_timeout_s",
    }  # fmt: skip

    # From the start of an attempt until all its ranks are started.
    start_timeout_s: float
    # How long a gang may stall without a proof that it hangs. 0: see `brain.diagnosis.stall_timeout`.
    hang_timeout_s: float | None
    # How long a node may send nothing before it counts as lost.
    node_timeout_s: float
    # How long an agent runs without contact by default. None on the local machine, where a lock shows whether it lives.
    fence_s: float | None
    # From TERM to KILL: for a whole gang, and for one that is broken and has nothing to save.
    stop_grace_s: float
    break_grace_s: float
    # Restarts without progress. 0: no restart at all.
    restarts_max: int
    # The first pause between two attempts without progress; it doubles up to the second.
    backoff_s: float
    backoff_max_s: float
    # Exit codes after which there is no restart.
    never_on_exit_codes: tuple[int, ...]
    # The whole job, from the moment its first attempt has nodes.
    time_limit_s: float | None
    # What a hang and a desync lead to: `fail`, `notify`, or `restart` after a hang.
    on_hang: str
    on_desync: str = "fail"
    # What a loss that is not finite leads to: `notify`, `rollback` to a checkpoint before it, or `fail`.
    on_nan: str = "notify"
    # After how many steps the parameters of ranks are compared. 0: never.
    compare_steps: int = 0
    # Saves of torch.distributed.checkpoint write in the background.
    saves_async: bool = False
    # From the start of all ranks until they have met, and until the first optimizer step.
    rendezvous_timeout_s: float | None = None
    first_step_timeout_s: float | None = None
    # How long an attempt may wait for hosts that other jobs use.
    queue_timeout_s: float | None = None
    # How long an agent runs without contact after a long time in which its ranks have made steps.
    disconnected_timeout_s: float = 0.0
    # Each node runs a script, and its ranks start where that calls a launcher.
    launches: bool = False
