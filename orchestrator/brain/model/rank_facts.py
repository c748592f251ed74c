"""Facts about ranks: their processes, signs of life and progress, and what was seen of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from orchestrator.core import observations
from orchestrator.core.status_types import Training, Usage
from orchestrator.core.wire.reports import RankHeartbeat

NO_HEARTBEAT = RankHeartbeat(-1, 0, "", 0, 0.0)
"""What is known of a rank before its first heartbeat."""


class RankState(enum.Enum):
    """Observed state of a rank's process."""

    WAITING = "waiting"
    ALIVE = "alive"
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank whose local compute time is longer than that of its peers."""

    # Its own work in a step without waiting for others, and the median of its peers' work.
    own_work_s: float
    peers_s: float
    # The attempt's own step and the time (job clock) since which it has been slow, and in how many reports in a row.
    step: int
    since_s: float
    reports: int

    @property
    def factor(self) -> float:
        return self.own_work_s / self.peers_s


REPORTING_RANKS_MAX = 16
"""How many ranks' reports are read for the job's loss."""


@dataclass(slots=True)
class RankFacts:
    """One rank in the current attempt."""

    rank: int
    node: str
    rank_state: RankState = RankState.WAITING
    pid: int = 0

    # From the last heartbeats that had them: few do.
    usage: Usage | None = None
    training: Training | None = None
    # Its last heartbeat, without these and what is not journaled, and what is the most of all heartbeats.
    beat: RankHeartbeat = NO_HEARTBEAT
    steps: int = 0
    state: str = ""
    log_bytes: int = 0
    cpu_s: float = 0.0
    # When each kind of sign was last seen, as in `SignTimes`.
    state_at: float = 0.0
    sign_at: float = 0.0
    # A step proves that the whole gang lives.
    step_at: float = 0.0
    beat_at: float = 0.0
    busy_at: float = 0.0
    pause_s: float = 0.0
    activity_at: float = 0.0
    # Its losses, as in `SignTimes`.
    finite_loss: float | None = None
    finite_steps: int = 0
    loss_steps: int = 0
    pass_at: float = 0.0
    group_at: float = 0.0
    # Not journaled: the counts of collectives, see `desync`, and slow work, see `stragglers`.
    group_keys: tuple[str, ...] = field(default=(), compare=False)
    straggler: Straggler | None = field(default=None, compare=False)

    # From inspections: the last one and when it was reported; when one found that the rank had entered another collective,
    # and when one last found it in something that may take long.
    inspection: observations.RankInspection | None = None
    inspected_at: float = 0.0
    collective_at: float = 0.0

    # How it ended, as in `Exited`.
    code: int | None = None
    signal: int | None = None
    died_at: float = 0.0
    stop_ordered: bool = False
    failure: observations.Failure | None = None
    is_oom: bool = False
    gpu_users: tuple[str, ...] = ()
    memory_full: str = ""

    @property
    def failed(self) -> bool:
        """Whether this rank ended badly without being ordered to stop."""
        return (
            self.rank_state is RankState.EXITED
            and not self.stop_ordered
            and (self.code or 0, self.signal or 0) != (0, 0)
        )

    @property
    def ended_well(self) -> bool:
        """Whether this rank ended by itself and with code 0; one that was stopped has not done its work."""
        return self.rank_state is RankState.EXITED and not self.stop_ordered and self.code == 0
