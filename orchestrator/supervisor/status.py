"""Status of a job: one object of `orch status --json`, from the plan and the brain's facts. Pure.

The supervisor writes it into the status file twice a second (`core/jobdir/status_file.py` has its types). Times of day
are UTC in ISO 8601, ages and durations are seconds. Keys are only ever added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.brain.diagnosis import stragglers, suspects
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import AttemptFacts, Facts, JobGoal, Phase
from orchestrator.brain.model.node_facts import AgentState, NodeFacts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.brain.scheduling import fence, placement
from orchestrator.core.codec import Json
from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import (
    ENDED,
    CheckpointStatus,
    IsoTime,
    NodeStatus,
    RankStatus,
    Status,
    StragglerStatus,
    iso,
)

__all__ = ["ENDED", "Now", "iso", "reason", "state", "status"]

NOTHING: Mapping[str, str] = MappingProxyType({})

MISSING_SHOWN = 4
"""The number of awaited nodes that a reason names."""

_PROCESS_STATES = {"T": "stopped", "t": "traced", "Z": "zombie", "D": "disk wait", "X": "dead"}


@dataclass(frozen=True, slots=True)
class Now:
    """The present on both clocks, to turn job clock readings into times of day and ages."""

    job_s: float
    wall_s: float

    def iso(self, at_s: float | None) -> IsoTime | None:
        """Return the time of day of a job clock reading."""
        return None if at_s is None else iso(self.wall_s - (self.job_s - at_s))

    def age_s(self, at_s: float) -> float:
        """Return how long ago a job clock reading was."""
        return round(max(0.0, self.job_s - at_s), 1)


def state(facts: Facts) -> str:
    """Return the job's state as the contract names it."""
    if facts.end is not None:
        return facts.end.value
    attempt = facts.attempt
    if attempt is None:
        waits = facts.queue is not None and not facts.allocation
        return "QUEUED" if facts.ahead or waits else "STARTING"
    if facts.goal is JobGoal.CANCEL:
        return "STOPPING"
    if facts.requeued_at is not None:
        return "QUEUED"
    if attempt.phase is Phase.STOP:
        return "RESTARTING" if attempt.verdict is not None and attempt.verdict.retry else "STOPPING"
    if attempt.running_at is not None:
        return "RUNNING"
    if placement.is_queued(facts) and attempt.number == facts.resumed_after + 1:
        return "QUEUED"
    return "STARTING" if attempt.number == facts.resumed_after + 1 else "RESTARTING"


def status(
    plan: Plan, facts: Facts, now: Now, rates: Mapping[int, float], reasons: Mapping[str, str] = NOTHING
) -> Status:
    """Return the job as `orch status --json` shows it.

    `rates`: steps a second of each rank that has any; `reasons`: why a node has no connection.
    """
    attempt = facts.attempt
    number, base = (attempt.number, attempt.base_step) if attempt else (0, 0)
    alive = [rank for rank in facts.ranks.values() if rank.rank_state is RankState.ALIVE]
    pace = [rates[rank.rank] for rank in alive if rank.rank in rates]
    hosts = {planned.name: planned.host for planned in plan.nodes}
    local = {number: index for node in facts.nodes.values() for index, number in enumerate(node.ranks)}
    return {
        **status_file.unknown(plan, state(facts), reason(facts), now.wall_s),
        "attempt": max(number, 1),
        "restarts": max(0, number - 1),
        "step": facts.step,
        "steps_per_s": round(min(pace), 3) if pace else None,
        "suspicion": (suspects.text(facts, now.job_s) if facts.end is None else "") or None,
        "notices": [*facts.host_findings, *(text for text in attempt.notices.values() if text)]
        if attempt
        else [],
        "progress": _progress(facts),
        "stragglers": _stragglers(facts),
        "started_at": now.iso(facts.run_began_at),
        "ended_at": now.iso(facts.ended_at),
        "checkpoint": _checkpoint(facts.checkpoint),
        "nodes": [
            _node(facts, node, now, hosts.get(node.name, ""), reasons.get(node.name, ""))
            for node in facts.nodes.values()
        ],
        "ranks": [
            _rank(base, rank, now, local.get(rank.rank, 0), rates.get(rank.rank))
            for rank in facts.ranks.values()
        ],
    }


def reason(facts: Facts) -> str:
    """Return in one line why the job is in its state; empty when there is nothing to explain."""
    attempt = facts.attempt
    if facts.end is not None:
        return facts.end_why
    if facts.goal is JobGoal.CANCEL:
        return f"{facts.cancelled}; its ranks are being stopped"
    if facts.requeued_at is not None:
        return f"waiting in the queue for nodes again; {facts.requeued}"
    if attempt is None:
        return _queue(facts)
    if attempt.verdict is not None:
        return f"{attempt.verdict.kind.value}: {attempt.verdict.summary}{_fence(facts, attempt)}{_compared(facts)}"
    coming = sorted(save.main for save in facts.saves.values() if save.is_coming)
    if coming and attempt.phase is Phase.STOP:
        return f"waiting for {', '.join(coming[:MISSING_SHOWN])} to be fetched"
    if placement.is_queued(facts):
        return _queue(facts)
    if attempt.running_at is None and facts.past and facts.past[-1].verdict is not None:
        last = facts.past[-1].verdict
        return f"restarting after {last.kind.value}: {last.summary}"
    missing = [
        f"{node.name} ({placement.note(node) or node.agent_state.value})"
        for node in facts.gang or facts.nodes.values()
        if node.agent_state is not AgentState.UP
        and (attempt.placed_at is not None or node.agent_state is not AgentState.ABSENT)
    ]
    if attempt.running_at is None and missing:
        more = len(missing) - MISSING_SHOWN
        return f"waiting for {', '.join(missing[:MISSING_SHOWN])}{f' and {more} more' if more > 0 else ''}"
    stopped = [str(rank.rank) for rank in facts.ranks.values() if rank.state in ("T", "Z")]
    return f"rank {', '.join(stopped)} stands still (state T or Z)" if stopped else ""


def _fence(facts: Facts, attempt: AttemptFacts) -> str:
    """Return for which silent nodes a restart waits, so that two attempts never run at the same time, and for
    how long at most."""
    silent = [
        node.name
        for node in facts.every_node()
        if node.agent_state is not AgentState.UP and not node.is_clear(attempt.number)
    ]
    if attempt.phase is not Phase.STOP or not silent or facts.limits is None or facts.broken_at() is None:
        return ""
    if facts.limits.fence_s is None:
        return f"; until no rank is left on {', '.join(silent[:MISSING_SHOWN])}, none is started"
    limit_s = max(fence.silent_s(facts, node) for node in facts.every_node() if node.name in silent)
    return f"; until ranks left on {', '.join(silent[:MISSING_SHOWN])} have surely ended, up to {limit_s:g} s, none is started"


def _compared(facts: Facts) -> str:
    """Return which save is read before the next attempt begins from it."""
    attempt = facts.attempt
    if attempt is None or attempt.compare_at is None or attempt.comparing not in facts.saves:
        return ""
    return f"; {facts.saves[attempt.comparing].main} is being read first, to see that it is what was written"


def verdict(given: d.Verdict, judged_at: float) -> Json:
    """Return a verdict as in `orch why --json` and notifications; `judged_at` is the job clock."""
    return {
        "kind": given.kind.value,
        "ranks": list(given.ranks),
        "node": given.node,
        "step": given.step,
        "summary": given.summary,
        "culprit": given.culprit,
        "waiting": given.waiting,
        "evidence": list(given.evidence),
        "detected_s": round(max(0.0, judged_at - given.since_s), 3),
    }


def _queue(facts: Facts) -> str:
    """Return what a job without hosts waits for."""
    if facts.ahead:
        more = len(facts.ahead) - MISSING_SHOWN
        first = ", ".join(facts.ahead[:MISSING_SHOWN])
        return f"waiting behind {first}{f' and {more} more' if more > 0 else ''}, which came first"
    busy = [f"{node.name} ({node.busy.reason})" for node in facts.nodes.values() if node.busy]
    more = len(busy) - MISSING_SHOWN
    first = ", ".join(busy[:MISSING_SHOWN])
    return f"waiting for {first}{f' and {more} more' if more > 0 else ''}" if busy else ""


def _stragglers(facts: Facts) -> list[StragglerStatus]:
    """Return the ranks of a running attempt whose own work holds up their peers, the slowest first."""
    attempt = facts.attempt
    if facts.end is not None or attempt is None or attempt.phase is not Phase.RUN:
        return []
    return [
        {
            "rank": rank.rank,
            "node": rank.node,
            "factor": round(rank.straggler.factor, 2),
            "own_s": round(rank.straggler.own_work_s, 4),
            "peers_s": round(rank.straggler.peers_s, 4),
            "since_step": attempt.base_step + rank.straggler.step,
        }
        for rank in stragglers.slow_ranks(facts)
        if rank.straggler is not None
    ]


def _progress(facts: Facts) -> str | None:
    """Return the progress bar of a job that makes no steps: that of the first rank that has one, as people read it."""
    if facts.attempt is None or facts.made:
        return None
    return next((rank.progress for rank in facts.ranks.values() if rank.progress), None)


def _checkpoint(checkpoint: d.Checkpoint | None) -> CheckpointStatus | None:
    return None if checkpoint is None else {"path": checkpoint.path, "step": checkpoint.step}


def _node(facts: Facts, node: NodeFacts, now: Now, host: str, reason: str) -> NodeStatus:
    # A new supervisor resets the contact of every node; a node whose agent never reported is not "seen".
    seen = now.age_s(node.contact_at) if node.contact_at and node.incarnation else None
    return {
        "name": node.name,
        "host": host,
        "state": _node_state(node, ended=facts.end is not None),
        "seen_s": seen,
        "role": "placed" if node.ranks else "spare" if node.agent_state is AgentState.UP else "idle",
        "ranks": list(node.ranks),
        "note": placement.note(node) or reason,
    }


def _node_state(node: NodeFacts, *, ended: bool) -> str:
    link: str = node.agent_state.value
    if node.agent_state is AgentState.UP:
        return link
    if node.excluded:
        return "excluded"
    if ended:
        return "left" if node.incarnation else link
    return "busy" if node.busy and node.agent_state is AgentState.ABSENT else link


def _rank(base: int, rank: RankFacts, now: Now, local: int, rate_per_s: float | None) -> RankStatus:
    alive = rank.rank_state is RankState.ALIVE
    shown = _PROCESS_STATES.get(rank.state, "running") if alive else rank.rank_state.value
    code = rank.code if rank.signal is None else -rank.signal
    return {
        "rank": rank.rank,
        "local_rank": local,
        "node": rank.node,
        "pid": rank.pid or None,
        "state": shown,
        "step": base + rank.steps if rank.steps else None,
        "steps_per_s": round(rate_per_s, 3) if alive and rate_per_s is not None else None,
        "beat_s": now.age_s(rank.beat_at) if alive else None,
        "exit": code,
        "progress": rank.progress or None,
    }
