"""Limits of a job: the bounds that its plan fixes and that the brain judges by. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit of a job. None means no limit, unless a field says otherwise."""

    # From the start of an attempt until all its ranks are started.
    start_s_max: float
    # How long a silence may be. 0: it follows from what the job has shown, within `hang_floor_s` and `hang_ceiling_s`.
    hang_s_max: float | None
    # How long a node may send nothing before it counts as lost.
    node_silent_s_max: float
    # How long an agent without contact goes on by default. None on the local machine, where a lock shows whether it lives.
    fence_s: float | None
    # From TERM to KILL: for a whole gang, and for one that is broken and has nothing to save.
    stop_grace_s: float
    break_grace_s: float
    # Restarts without progress. 0: no restart at all.
    restarts_max: int
    # The first pause between two attempts without progress; it doubles up to the second.
    backoff_s: float
    backoff_s_max: float
    # Exit codes after which there is no restart.
    never_on_exit_codes: tuple[int, ...]
    # The whole job, from the moment its first attempt has nodes.
    time_s_max: float | None
    # What a hang and a desync lead to: `fail`, `notify`, or `restart` after a hang.
    on_hang: str
    on_desync: str = "fail"
    # From the start of all ranks until they have met, and until the first optimizer step.
    rendezvous_s_max: float | None = None
    first_step_s_max: float | None = None
    hang_floor_s: float = 5.0
    hang_ceiling_s: float = 600.0
    # How long an attempt may wait for hosts that other jobs use.
    queue_s_max: float | None = None
    # How long a rank may stand in one place while others wait for it. 0: the default, see `brain.diagnosis.suspicion`.
    patience_s: float | None = 0.0
