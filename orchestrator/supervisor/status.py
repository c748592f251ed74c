"""Status of a job: one object of `orch status --json`, from the plan and the brain's facts. Pure.

The supervisor writes it into the status file twice a second (`core/jobdir/status_file.py` has its types). Times of day
are UTC in ISO 8601, ages and durations are seconds. Keys are only ever added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType

from orchestrator.brain import stragglers, training
from orchestrator.brain.diagnosis import suspects, suspicion
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import AttemptFacts, Facts, JobGoal, Phase
from orchestrator.brain.model.node_facts import AgentState, NodeFacts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.brain.scheduling import checkpoint_trust, placement, restart_policy
from orchestrator.core.checkpoints import memory
from orchestrator.core.checkpoints.checkpoint import Checkpoint
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.codec import Json
from orchestrator.core.errors import Fault
from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.series import Measurement, RankMeasurement
from orchestrator.core.jobdir.status_file import (
    ENDED,
    CheckpointStatus,
    NodeStatus,
    RankStatus,
    Status,
    StragglerStatus,
    TransferStatus,
    iso,
)
from orchestrator.core.status_types import NOT_MEASURED, NOT_REPORTED, Suspicion
from orchestrator.core.text import one_line_fault, what_and_fix
from orchestrator.supervisor import wait_texts
from orchestrator.supervisor.wait_texts import MISSING_SHOWN, Now

__all__ = ["ENDED", "Now", "iso", "reason", "state", "status"]

NOTHING: Mapping[str, str] = MappingProxyType({})

PASSED_SHOWN = 3
"""The number of passed checkpoints that notices name."""

_SETUP_TOPICS = (
    d.NoticeTopic.ALONE,
    d.NoticeTopic.STEPS,
    d.NoticeTopic.LOSS,
    d.NoticeTopic.REPLICAS,
    d.NoticeTopic.MEMORY,
    d.NoticeTopic.END,
)
"""What notices of a status are about; hangs are its suspicion, slow ranks its stragglers."""

_PROCESS_STATES = {"T": "stopped", "t": "traced", "Z": "zombie", "D": "disk wait", "X": "dead"}


def state(facts: Facts) -> str:
    """Return the job's state as the contract names it."""
    if facts.end is not None:
        return facts.end.value
    attempt = facts.attempt
    if attempt is None:
        waits = facts.queue is not None and not facts.allocation
        return "QUEUED" if facts.jobs_ahead or waits else "STARTING"
    if facts.goal is JobGoal.CANCEL:
        return "STOPPING"
    if facts.requeued_at is not None:
        return "QUEUED"
    if attempt.phase is Phase.STOP:
        retry = attempt.verdict is not None and attempt.verdict.retry
        return "RESTARTING" if retry or _user_request(facts, attempt) else "STOPPING"
    if attempt.running_at is not None:
        return "RUNNING"
    if placement.is_queued(facts) and attempt.number == facts.resumed_after + 1:
        return "QUEUED"
    return "STARTING" if attempt.number == facts.resumed_after + 1 else "RESTARTING"


def status(
    plan: Plan,
    facts: Facts,
    now: Now,
    reasons: Mapping[str, str] = NOTHING,
    transfers: Sequence[TransferStatus] = (),
    notices: Sequence[str] = (),
    ledger: Mapping[int, Checkpoint] = MappingProxyType({}),
) -> Status:
    """Return the job as `orch status --json` shows it. `reasons`: why a node has no connection; `transfers`: checkpoints in
    transfer; `notices`: those that do not follow from facts; `ledger`: checkpoints with their files."""
    attempt = facts.attempt
    number, base = (attempt.number, attempt.call_step) if attempt else (0, 0)
    alive = [rank for rank in facts.ranks.values() if rank.rank_state is RankState.ALIVE]
    now_state = state(facts)
    rates = {rank.rank: _rate_per_s(facts, rank, now) for rank in alive} if now_state == "RUNNING" else {}
    rates_known = [rate_per_s for rate_per_s in rates.values() if rate_per_s is not None]
    slowest = min(
        [rate for rate in rates_known if rate] or rates_known, default=None
    )  # some ranks only serve the others
    reported = training.reported_training(facts)
    total = plan.total_steps or training.total_steps(facts.step, training.rate_per_s(facts), reported)
    suspected = _suspected(facts, now) if facts.end is None else None
    hosts = {planned.name: planned.host for planned in plan.nodes}
    local = {number: index for node in facts.nodes.values() for index, number in enumerate(node.ranks)}
    return replace(
        status_file.status_from_plan(plan, now_state, reason(facts, now), now.wall_s),
        attempt=max(number, 1),
        restarts=max(0, number - 1 - facts.resume_count),
        launch_call=attempt.call if attempt else 1,
        step=facts.step,
        steps_per_s=None if slowest is None else round(slowest, 3),
        suspicion=suspected.what if suspected is not None else None,
        suspected=suspected,
        notices=(*_notices(facts), *notices),
        progress=_progress(facts),
        training=training.estimate_progress(reported, facts.step, total, slowest if now_state == "RUNNING" else 0.0),
        stragglers=_stragglers(facts),
        started_at=now.iso(facts.run_began_at),
        ended_at=now.iso(facts.ended_at),
        checkpoint=_checkpoint(facts.checkpoint, ledger),
        nodes=tuple(
            _node(facts, node, now, hosts.get(node.name, ""), reasons.get(node.name, ""))
            for node in facts.nodes.values()
        ),
        ranks=tuple(
            _rank(base, rank, now, local.get(rank.rank, 0), rates.get(rank.rank), plan.total_steps)
            for rank in facts.ranks.values()
        ),
        travels=tuple(transfers),
    )


def reason(facts: Facts, now: Now | None = None) -> str:
    """Return in one line why the job is in its state; empty when there is nothing to explain. With `now` it says until when
    the job waits."""
    attempt = facts.attempt
    if facts.end is not None:
        return facts.end_why
    if facts.goal is JobGoal.CANCEL:
        return f"{facts.cancel_reason}; its ranks are being stopped"
    if facts.requeued_at is not None:
        return f"waiting in the queue for nodes again; {facts.requeue_reason}"
    if attempt is None:
        return _queue_text(facts)
    if attempt.verdict is not None:
        return f"{attempt.verdict.kind.value}: {attempt.verdict.summary}{wait_texts.fence_text(facts, attempt, now)}{wait_texts.compare_text(facts)}"
    coming = sorted(checkpoint.main for checkpoint in facts.checkpoints.values() if checkpoint.is_in_transit)
    if coming and attempt.phase is Phase.STOP:
        return f"waiting for {', '.join(coming[:MISSING_SHOWN])} to be fetched"
    if asked := _user_request(facts, attempt):
        return f"{asked}{wait_texts.fence_text(facts, attempt, now)}{wait_texts.compare_text(facts)}"
    if placement.is_queued(facts):
        return _queue_text(facts)
    if attempt.running_at is None and facts.past_attempts and facts.past_attempts[-1].verdict is not None:
        last = facts.past_attempts[-1].verdict
        awaited = wait_texts.host_text(facts, attempt, now)
        return f"attempt {facts.past_attempts[-1].number} ended: {last.kind.value}: {last.summary}{awaited}"
    missing = [
        f"{node.name} ({_absence_reason(node)})"
        for node in facts.gang or facts.nodes.values()
        if node.agent_state is not AgentState.UP
        and (attempt.placed_at is not None or node.agent_state is not AgentState.ABSENT)
    ]
    if attempt.running_at is None and missing:
        return f"waiting for {_first_few(missing)}"
    if attempt.running_at is not None and facts.are_ranks_done and not facts.is_done:
        running = ", ".join([node.name for node in facts.gang if facts.runs_script(node)][:MISSING_SHOWN])
        return f"all ranks have ended with code 0; the script continues on {running}"
    stopped = [str(rank.rank) for rank in facts.ranks.values() if rank.state in ("T", "Z")]
    return f"rank {', '.join(stopped)} is stopped or a zombie (state T or Z)" if stopped else ""


def _user_request(facts: Facts, attempt: AttemptFacts) -> str:
    """Return the user's request that another attempt follows, a resume or a restart; empty for none."""
    if attempt.number <= facts.resumed_after:
        return restart_policy.RESUME_REQUESTED
    is_asked = attempt.phase is Phase.STOP and attempt.verdict is None and attempt.restart_requested
    return restart_policy.RESTART_REQUESTED if is_asked and not facts.is_done else ""


def _absence_reason(node: NodeFacts) -> str:
    fault = placement.unused_reason(node)
    return what_and_fix(fault) if fault else _AGENT_STATE_TEXTS[node.agent_state]


_AGENT_STATE_TEXTS = {
    AgentState.ABSENT: "not started yet",
    AgentState.LAUNCHING: "being started",
    AgentState.SILENT: "silent",
    AgentState.UP: "up",
}


def verdict(judged: d.Verdict, judged_at: float) -> Json:
    """Return a verdict as in `orch why --json` and notifications; `judged_at` is the job clock."""
    frame = judged.signature.frame
    return {
        "kind": judged.kind.value,
        "ranks": list(judged.ranks),
        "node": judged.node,
        "step": judged.step,
        "summary": judged.summary,
        "culprit": judged.culprit,
        "waiting": judged.waiting,
        "evidence": list(judged.evidence),
        "head": judged.head,
        "proof": [
            {"kind": piece.kind.value, "text": piece.text, "node": piece.node, "fix": piece.fix}
            for piece in judged.proof
        ],
        "signature": list(judged.signature.texts),
        "frame": asdict(frame) if frame is not None else None,
        "detected_s": round(max(0.0, judged_at - judged.since_s), 3),
    }


def _queue_text(facts: Facts) -> str:
    """Return what a job without hosts waits for."""
    if facts.jobs_ahead:
        return f"waiting behind {_first_few(facts.jobs_ahead)}, submitted earlier"
    busy = [f"{node.name} ({node.host_busy.reason})" for node in facts.nodes.values() if node.host_busy]
    return f"waiting for {_first_few(busy)}" if busy else ""


def _first_few(names: Sequence[str]) -> str:
    more = len(names) - MISSING_SHOWN
    return f"{', '.join(names[:MISSING_SHOWN])}{f' and {more} more' if more > 0 else ''}"


def _stragglers(facts: Facts) -> tuple[StragglerStatus, ...]:
    """Return the ranks of a running attempt whose own work holds up their peers, the slowest first."""
    attempt = facts.attempt
    if facts.end is not None or attempt is None or attempt.phase is not Phase.RUN:
        return ()
    return tuple(
        StragglerStatus(
            rank=rank.rank, node=rank.node, factor=round(slow.factor, 2), own_s=round(slow.own_work_s, 4),
            peers_s=round(slow.peers_s, 4), since_step=attempt.call_step + slow.step,
            gpu_remarks=stragglers.gpu_remarks(facts, rank),
        )
        for rank in stragglers.slow_ranks(facts)
        if (slow := rank.straggler) is not None
    )  # fmt: skip


def _suspected(facts: Facts, now: Now) -> Suspicion | None:
    """Return the suspicion, with rounded ages."""
    current = suspects.current_suspicion(facts, now.job_s)
    if current is None:
        return None
    in_s = None if current.in_s is None else round(current.in_s, 1)
    return replace(current, for_s=round(current.for_s, 1), in_s=in_s)


def _rate_per_s(facts: Facts, rank: RankFacts, now: Now) -> float | None:
    """Return the pace of a rank: 0 while it makes no steps."""
    rate_per_s = rank.beat.rate_per_s
    return rate_per_s if rate_per_s is None or suspicion.is_stepping(facts, rank, now.job_s) else 0.0


def _notices(facts: Facts) -> Iterator[str]:
    """Yield what a person should know of how the job is set up: of each topic the last notice of all attempts, and how the
    present attempt has begun."""
    attempt = facts.attempt
    if attempt is None:
        return
    given = {one.topic: one for past in facts.past_attempts for one in past.attempt.notices}
    given.pop(d.NoticeTopic.MEMORY, None)  # each attempt looks again
    given |= {one.topic: one for one in attempt.notices}
    for topic in _SETUP_TOPICS:
        if (notice := given.get(topic)) is not None and not notice.withdrawn:
            yield one_line_fault(notice.why, fix=notice.fix)
    if ignores := checkpoint_trust.ignored_checkpoint_text(attempt):
        yield ignores
    for loser in attempt.passed_over[:PASSED_SHOWN]:
        at = "" if loser.step is None else f" (step {loser.step:,})"
        yield f"attempt {attempt.number} did not resume from {loser.main}{at}: {loser.why}"


def _checkpoint(newest: ResumePoint | None, ledger: Mapping[int, Checkpoint]) -> CheckpointStatus | None:
    if newest is None or newest.save not in ledger:
        return None if newest is None else CheckpointStatus(newest.path, newest.step)
    checkpoint = ledger[newest.save]
    safe = list(memory.safe_files(checkpoint))
    safe_bytes, is_safe = sum(piece.size_bytes for piece in safe), len(safe) == len(checkpoint.files)
    return CheckpointStatus(newest.path, newest.step, is_safe, checkpoint.size_bytes, safe_bytes)


def _progress(facts: Facts) -> str | None:
    """Return the progress bar of a job that makes no steps: that of the first rank that has one, as people read it."""
    if facts.attempt is None or facts.steps_made:
        return None
    return next((text for rank in facts.ranks.values() if (text := _rank_progress(rank))), None)


def _rank_progress(rank: RankFacts) -> str | None:
    return rank.beat.progress or (f"{rank.beat.passes} backward passes" if rank.beat.passes else None)


def _node(facts: Facts, node: NodeFacts, now: Now, host: str, reason: str) -> NodeStatus:
    # A new supervisor resets the contact of every node; a node whose agent never reported is not "seen".
    seen_s = now.age_s(node.contact_at) if node.contact_at and node.incarnation else None
    fault = placement.unused_reason(node) or Fault(node.name, reason)
    return NodeStatus(
        name=node.name,
        host=host,
        state=_node_state(node, ended=facts.end is not None),
        seen_s=seen_s,
        role="placed" if node.ranks else "spare" if node.agent_state is AgentState.UP else "idle",
        ranks=list(node.ranks),
        note=fault.what,
        fix=fault.fix,
    )


def _node_state(node: NodeFacts, *, ended: bool) -> str:
    link: str = node.agent_state.value
    if node.agent_state is AgentState.UP:
        return link
    if node.excluded:
        return "excluded"
    if ended:
        return "left" if node.incarnation else "busy" if node.host_busy else link
    return "busy" if node.host_busy and node.agent_state is AgentState.ABSENT else link


def _rank(base: int, rank: RankFacts, now: Now, local: int, rate_per_s: float | None, total: int | None) -> RankStatus:
    alive = rank.rank_state is RankState.ALIVE
    step = base + rank.steps if rank.steps else None
    reported = rank.training or NOT_REPORTED
    total = total or training.total_steps(step, rank.beat.rate_per_s, reported)
    return RankStatus(
        rank=rank.rank,
        local_rank=local,
        node=rank.node,
        pid=rank.pid or None,
        state=_PROCESS_STATES.get(rank.state, "running") if alive else rank.rank_state.value,
        step=step,
        steps_per_s=round(rate_per_s, 3) if rate_per_s is not None else None,
        beat_s=now.age_s(rank.beat_at) if alive else None,
        exit=rank.code if rank.signal is None else -rank.signal,
        progress=_rank_progress(rank),
        training=training.estimate_progress(reported, step, total, rate_per_s if alive else 0.0),
        usage=(rank.usage if alive else None) or NOT_MEASURED,
        step_age_s=now.age_s(rank.step_at) if alive and rank.steps else None,
    )


def sample(status: Status, facts: Facts, wall_s: float) -> Measurement:
    """Return what the living ranks measure, for the job's series."""
    return Measurement(
        wall_s,
        status.attempt,
        tuple(
            RankMeasurement(
                rank=rank.rank,
                step=rank.step,
                steps_per_s=rank.steps_per_s,
                step_s=facts.ranks[rank.rank].beat.median_step_s,
                loss=rank.training.loss,
                learning_rate=rank.training.learning_rate,
                usage=rank.usage,
            )
            for rank in status.ranks
            if facts.ranks[rank.rank].rank_state is RankState.ALIVE
        ),
    )
