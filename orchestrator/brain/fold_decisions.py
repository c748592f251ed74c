"""Journaled decisions, folded into the facts: what was ordered is a wish until it is observed.

An attempt begins here, and what must outlive the previous attempt is noted: how far it came, and which nodes the next
one avoids.
"""

from __future__ import annotations

from typing import Any, cast

from orchestrator.brain.diagnosis import desync, divergence, suspicion
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import AttemptFacts, Facts, PastAttempt, Phase
from orchestrator.brain.model.node_facts import GPU_FIX, AgentState, NodeFacts, RendezvousFacts
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.brain.scheduling import checkpoint_trust, host_faults, placement
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.errors import Fault
from orchestrator.core.plan_types import PlannedPool
from orchestrator.core.wire import orders

HANGS_MAX = 2
"""Hangs on one host after which the job avoids it, if there is another host."""


def unplaced_ranks(pool: PlannedPool) -> dict[int, RankFacts]:
    """Return the ranks of an attempt that has no nodes yet."""
    return {rank: RankFacts(rank, "") for rank in range(pool.nodes * pool.ranks_each)}


def archive_attempt(facts: Facts) -> None:
    """Move the current attempt to the past attempts, once; only a failure without progress spends the restart budget."""
    attempt = facts.attempt
    if attempt is None or (facts.past_attempts and facts.past_attempts[-1].number == attempt.number):
        return
    has_progressed = facts.has_progressed()
    facts.past_attempts.append(PastAttempt(attempt, facts.step, has_progressed))
    facts.best_step = max(facts.best_step, facts.step or 0)
    facts.restarts_spent += 0 if has_progressed or attempt.costs_no_restart else 1
    if has_progressed:
        facts.distrusted_checkpoints = ()


def _begin_attempt(facts: Facts, news: d.BeginAttempt) -> None:
    archive_attempt(facts)
    if (
        facts.attempt is not None
        and facts.attempt.number > facts.resumed_after
        and facts.attempt.allocation_lost_at is None
    ):
        _note_missing(facts, facts.attempt)
        host_faults.readmit(facts)
    facts.attempt = AttemptFacts(news.attempt, news.at, news.at, news.resume)
    facts.attempt.passed_over = news.passed_over
    facts.resume_count += 0 < facts.resumed_after == news.attempt - 1
    facts.ranks = {number: RankFacts(number, rank.node) for number, rank in facts.ranks.items()}
    facts.forget_signs()
    desync.forget_counts(facts)
    if facts.pool is None:
        _begin_run(facts, facts.attempt, news.at)
    else:
        facts.ranks = unplaced_ranks(facts.pool)
    for node in facts.nodes.values():
        node.rendezvous, node.inspection_answered = RendezvousFacts(), 0
        node.setup_failure = node.agent_loss = node.script_end = None
        node.launcher_call, node.launcher_call_at = 0, 0.0
        if facts.pool is not None:
            node.launch_failures = 0
    for node in facts.every_node() if facts.pool is not None else ():
        node.ranks = ()


def _begin_run(facts: Facts, attempt: AttemptFacts, at: float) -> None:
    """Note that the attempt has its nodes; the job's time limit starts with its first attempt."""
    attempt.placed_at = at
    if facts.run_began_at is None:
        facts.run_began_at = at


def _note_missing(facts: Facts, attempt: AttemptFacts) -> None:
    """Remember, beyond the attempt, which nodes were lost in it, and which could not be made ready."""
    verdict = attempt.verdict
    has_other_hosts = facts.pool is not None and len(facts.nodes) > facts.pool.nodes
    for node in facts.nodes.values():
        if node.agent_state is not AgentState.UP and (lost := node.loss_reason(verdict)):
            node.lost_earlier = lost
        elif node.setup_failure is not None and not node.setup_failure.save and has_other_hosts:
            node.excluded = Fault(node.name, node.setup_failure.reason)
        elif (
            verdict is not None
            and placement.has_another(facts)
            and (verdict.kind, verdict.node) == (d.VerdictKind.START_TIMEOUT, node.name)
        ):
            node.excluded = Fault(
                node.name, f"excluded: in attempt {attempt.number} all but this host were ready in time"
            )
        elif attempt.leaves_host and verdict is not None and verdict.node == node.name:
            node.excluded = Fault(node.name, f"excluded: {verdict.host_fault}", GPU_FIX)
        elif placement.has_another(facts) and (hung := _hang_again_text(facts, attempt, node)):
            node.excluded = Fault(node.name, hung)
    may_run_elsewhere = has_other_hosts or facts.queue is not None
    if may_run_elsewhere and verdict is not None and verdict.signature.cause is d.FailureCause.UNREACHABLE:
        _exclude_unreachable(facts, verdict)


def _hang_again_text(facts: Facts, attempt: AttemptFacts, node: NodeFacts) -> str:
    """Say that ranks have hung on a node in this attempt and in one before; empty if they have not."""
    hangs = [
        past
        for past in facts.past_attempts
        if past.number > facts.resumed_after
        and past.verdict is not None
        and past.verdict.kind is d.VerdictKind.HANG
        and past.verdict.node == node.name
    ]
    if len(hangs) < HANGS_MAX or hangs[-1].number != attempt.number:
        return ""
    numbers = " and ".join(str(past.number) for past in hangs[-HANGS_MAX:])
    return f"excluded: ranks hung on it in attempts {numbers}"


def _exclude_unreachable(facts: Facts, verdict: d.Verdict) -> None:
    """Exclude a node that cannot reach the others, and clear the nodes that were excluded because of it."""
    for past in facts.past_attempts:
        earlier_verdict = past.verdict
        if earlier_verdict is None or earlier_verdict.node not in facts.nodes:
            continue
        if (
            earlier_verdict.signature.cause is d.FailureCause.UNREACHABLE
            and earlier_verdict.signature.place[-1] == verdict.node
        ):
            facts.nodes[earlier_verdict.node].excluded = None
    facts.nodes[verdict.node].excluded = Fault(verdict.node, verdict.summary)


def _place(facts: Facts, news: d.Place) -> None:
    for name, ranks in news.nodes:
        facts.nodes[name].ranks = ranks
        for rank in ranks:
            facts.ranks[rank].node = name
    facts.ranks = dict(facts.ranks)  # see `Facts.ranks_on`
    facts.last_hosts = tuple(name for name, _ in news.nodes)
    _begin_run(facts, cast(AttemptFacts, facts.attempt), news.at)


def _launch(facts: Facts, news: d.Launch) -> None:
    node = _find_node(facts, news.node)
    if facts.pool is not None and news.at >= placement.busy_retry_at(facts):
        facts.busy_round_at = news.at
    node.agent_state = AgentState.LAUNCHING
    node.launched_at = news.at


def _find_node(facts: Facts, name: str) -> NodeFacts:
    node = facts.node(name)
    assert node is not None, f"a decision about {name}, which no plan knows"
    return node


def _to(facts: Facts, news: d.To) -> None:
    node, order = _find_node(facts, news.node), news.order
    match order:
        case orders.Prepare():
            node.ordered.prepare = order.attempt
            if facts.runs_launch_script:  # its script may run from now on
                _note_may_run(node, order.attempt)
        case orders.Probe():
            node.ordered.probe = order.attempt
        case orders.Start():
            node.ordered.start = order.attempt
            _note_may_run(node, order.attempt)
            node.startup_timeout_s = 0.0
            cast(AttemptFacts, facts.attempt).phase = Phase.RUN
        case orders.Inspect():
            _inspect(facts, order, news.at)
        case orders.Fence():
            node.fence_s = max(node.fence_s, order.contact_timeout_s)
            node.startup_timeout_s = max(node.startup_timeout_s, order.startup_timeout_s)
            node.is_fence_uncertain = False
        case orders.Stop():
            node.ordered.stop, node.ordered.stop_at = order.attempt, news.at
        case orders.Dismiss():
            node.ordered.leave = True


def _note_may_run(node: NodeFacts, attempt: int) -> None:
    node.may_run_attempt = attempt
    node.cleared_attempt = min(node.cleared_attempt, attempt - 1)


def _inspect(facts: Facts, news: orders.Inspect, at: float) -> None:
    attempt = cast(AttemptFacts, facts.attempt)
    if news.inspection > attempt.inspection:  # one inspection is an order to each node
        is_same_silence = attempt.inspected_at is not None and attempt.inspected_at >= suspicion.quiet_since(
            facts, attempt
        )
        attempt.inspections_in_silence = attempt.inspections_in_silence + 1 if is_same_silence else 1
    attempt.inspection, attempt.inspected_at = news.inspection, at
    facts.inspect_answered = facts.inspect_requested


def _next_call(facts: Facts, news: d.NextCall) -> None:
    attempt = cast(AttemptFacts, facts.attempt)
    attempt.call, attempt.call_at, attempt.running_at = news.call, news.at, None
    attempt.earlier_steps = facts.steps_made
    facts.ranks = {number: RankFacts(number, rank.node) for number, rank in facts.ranks.items()}
    facts.forget_signs()
    desync.forget_counts(facts)
    for node in facts.gang:
        node.started_attempt = node.ordered.start = 0


def _judge(facts: Facts, news: d.Judge) -> None:
    attempt = cast(AttemptFacts, facts.attempt)
    attempt.verdict = news.verdict
    attempt.own_steps_at_failure = attempt.own_steps(news.verdict)
    if news.verdict.kind is d.VerdictKind.DIVERGED:
        attempt.sound_step = divergence.sound_step(facts, attempt)
    attempt.judged_at = news.at
    attempt.leaves_host = host_faults.leaves_host(facts, news.verdict)
    checkpoint_trust.fold_judged(facts, attempt)
    _begin_stop(attempt, news.at)


def _begin_stop(attempt: AttemptFacts, at: float) -> None:
    attempt.phase = Phase.STOP
    attempt.stop_at = at


def _notice(facts: Facts, news: d.Notice) -> None:
    attempt = cast(AttemptFacts, facts.attempt)
    others = [notice for notice in attempt.notices if (notice.topic, notice.key) != (news.topic, news.key)]
    attempt.notices = [*others, news]


def _finish(facts: Facts, news: d.Finish) -> None:
    _begin_stop(cast(AttemptFacts, facts.attempt), news.at)


def _compare_checkpoint(facts: Facts, news: d.CompareCheckpoint) -> None:
    attempt = cast(AttemptFacts, facts.attempt)
    attempt.compare_ordered_at, attempt.checkpoint_to_compare = news.at, news.save


def _distrust_checkpoint(facts: Facts, news: d.DistrustCheckpoint) -> None:
    checkpoint_trust.set_state(facts, news.save, CheckpointState.DISTRUSTED, news.why)
    facts.distrusted_checkpoints = (*facts.distrusted_checkpoints, news.save)
    attempt = cast(AttemptFacts, facts.attempt)
    if attempt.checkpoint_to_compare == news.save:
        attempt.compare_ordered_at = None


def _end_job(facts: Facts, news: d.EndJob) -> None:
    if news.end is not d.JobEnd.SUCCEEDED and not facts.has_progressed():
        checkpoint_trust.restore_trust(facts)
    while facts.resume_override is not None and not facts.resume_override.is_superseded_by(
        facts.checkpoint_choice.checkpoint or facts.checkpoint_choice.world_size_mismatch
    ):
        facts.resume_overrides = facts.resume_overrides[:-1]
    facts.end = news.end
    facts.end_why = news.why
    facts.ended_at = news.at


def _requeue(facts: Facts, news: d.Requeue) -> None:
    facts.requeued_at, facts.requeue_reason = news.at, news.why


FOLDS: dict[type[Any], Any] = {
    d.BeginAttempt: _begin_attempt,
    d.CompareCheckpoint: _compare_checkpoint,
    d.DistrustCheckpoint: _distrust_checkpoint,
    d.Launch: _launch,
    d.To: _to,
    d.Place: _place,
    d.NextCall: _next_call,
    d.Judge: _judge,
    d.Notice: _notice,
    d.Finish: _finish,
    d.EndJob: _end_job,
    d.Requeue: _requeue,
}
