"""The brain itself: `learn` and `decide`. The package's docstring states the caller's duties."""

from __future__ import annotations

import functools

from orchestrator.brain import notices, stragglers
from orchestrator.brain.diagnosis import desync, hang, inspections, suspects, suspicion
from orchestrator.brain.diagnosis.diagnose import diagnose
from orchestrator.brain.fold_events import fold
from orchestrator.brain.fold_heartbeats import coalesce_heartbeats
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision
from orchestrator.brain.model.facts import AttemptFacts, Facts, JobGoal, News, Phase
from orchestrator.brain.model.node_facts import AgentState, NodeFacts
from orchestrator.brain.scheduling import (
    allocation,
    checkpoints,
    fence,
    launch_calls,
    placement,
    rendezvous,
    restart_policy,
)
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.wire.orders import Prepare, Start, Stop

KILL_S_MAX = 60.0
"""How long after TERM and grace the processes of a rank may survive KILL before the job gives up."""

UNREACHABLE_S_MAX = 600.0
"""How long after the grace an unreachable node is waited for, since it may still run something."""

SLEEP_S_MIN = 10.0
"""A call of `decide` this much later than requested: the supervisor's machine was suspended."""


CHECKPOINT_EVENTS = (e.CheckpointChanged, e.CheckpointCompared, e.ResumedElsewhere, e.CheckpointRead)
"""Checkpoint events carry their own step counts, so they fold to the same facts before and after the heartbeats."""

COMPARE_S_MAX = 4 * 3_600.0
"""How long a checkpoint may take to be read before an attempt, also from a disk that does not answer."""


class Brain:
    """Facts of one job, and the decisions that follow from them. `beaten_at`: for each node with heartbeats not journaled yet, when
    the last of them came."""

    def __init__(self, facts: Facts | None = None, heartbeat_at: dict[str, float] | None = None) -> None:
        self.facts = Facts() if facts is None else facts
        self._heartbeat_at = {} if heartbeat_at is None else heartbeat_at

    def learn(self, news: News) -> None:
        """Fold an event, or a journaled decision, into the facts."""
        fold(self.facts, news)
        if e.is_heartbeat(news):
            self._heartbeat_at[news.node] = news.at

    def heartbeats_before(self, news: News) -> list[e.FromNode]:
        """Return what goes to the journal before `news`: nothing before a checkpoint, else `beats`."""
        return [] if isinstance(news, CHECKPOINT_EVENTS) else self.take_heartbeats()

    def take_heartbeats(self) -> list[e.FromNode]:
        """Return the heartbeats learned since the last call, coalesced to one for each node, for the journal.

        Folding them into the facts as they were at the last call gives the facts as they are now.
        """
        heartbeats = [coalesce_heartbeats(self.facts, node, at) for node, at in self._heartbeat_at.items()]
        self._heartbeat_at.clear()
        return heartbeats

    def decide(self, now_s: float) -> tuple[list[Decision], float]:
        """Return the decisions to carry out now, and the job clock (s) at which to call again if nothing happens (may be inf)."""
        deadlines = Deadlines(now_s)
        decisions = _decide(self.facts, deadlines)
        return decisions, (now_s if decisions else deadlines.wake_s)


def _decide(facts: Facts, deadlines: Deadlines) -> list[Decision]:
    attempt = facts.attempt
    if facts.limits is None:
        return []
    if facts.end is not None:
        return placement.dismissals(facts, facts.every_node(), "the job has ended", deadlines)
    if facts.allocation_end is not None:
        return allocation.decide_allocation_ended(facts, facts.allocation_end, deadlines)
    if facts.requeued_at is not None:  # idle until there is another allocation
        return placement.dismissals(facts, facts.every_node(), "the allocation is released", deadlines)
    if attempt is None:
        return _begin_first_attempt(facts, deadlines)
    if notices_due := notices.decide(facts, attempt, deadlines):
        return notices_due
    if attempt.phase is Phase.STOP:
        return _stop(facts, attempt, deadlines)
    dismissals = placement.dismissals(facts, facts.leaving.values(), "the plan no longer uses this node", deadlines)
    return dismissals or _check_attempt_end(facts, attempt, deadlines) or _advance_attempt(facts, attempt, deadlines)


def _begin_first_attempt(facts: Facts, deadlines: Deadlines) -> list[Decision]:
    if facts.goal is JobGoal.CANCEL:
        return [d.EndJob(deadlines.now_s, f"{facts.cancel_reason} before it began", 0, d.JobEnd.CANCELLED)]
    if why := checkpoints.no_attempt_reason(facts):  # resumed from a checkpoint that a person has adopted
        return [d.EndJob(deadlines.now_s, why, 0, d.JobEnd.FAILED)]
    return [d.BeginAttempt(deadlines.now_s, "submitted", 1, facts.checkpoint)]


def _check_attempt_end(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Decide whether the attempt is to end: cancelled, done, restarted, or judged. Evidence of a hang is taken before
    its verdict."""
    if facts.goal is JobGoal.CANCEL:
        return [d.Finish(deadlines.now_s, facts.cancel_reason, attempt.number, d.AttemptEnd.CANCELLED)]
    if facts.is_done:
        finish = d.Finish(deadlines.now_s, "every rank exited with code 0", attempt.number)
        return desync.decide(facts, attempt, deadlines) or [finish]
    if attempt.restart_requested:
        return [d.Finish(deadlines.now_s, restart_policy.RESTART_REQUESTED, attempt.number, d.AttemptEnd.RESTART)]
    verdict = diagnose(facts, deadlines)
    if verdict is None:
        informative = desync.decide(facts, attempt, deadlines) or stragglers.decide(facts, attempt, deadlines)
        if informative:
            return informative
        return (
            _withdraw_hang(facts, attempt, deadlines)
            or suspects.decide(facts, attempt, deadlines)
            or _inspect(facts, attempt, deadlines)
        )
    if verdict.signature.kind is not d.VerdictKind.HANG:
        return [d.Judge(deadlines.now_s, verdict.summary, attempt.number, verdict)]
    return _judge_hang(facts, attempt, verdict, deadlines)


def _judge_hang(facts: Facts, attempt: AttemptFacts, verdict: d.Verdict, deadlines: Deadlines) -> list[Decision]:
    """Order an inspection as evidence, then judge: no rank is stopped before every rank was inspected."""
    assert facts.limits is not None
    if attempt.inspected_at is None or attempt.inspected_at < verdict.since_s:
        return inspections.inspect_orders(facts, attempt, f"evidence before the verdict: {verdict.summary}", deadlines)
    if not inspections.is_answered(facts, attempt, deadlines):
        return []
    if facts.limits.on_hang != "notify":
        return [d.Judge(deadlines.now_s, verdict.summary, attempt.number, verdict)]
    if attempt.active_notice(d.NoticeTopic.HANG) is None:
        return [d.Notice(deadlines.now_s, verdict.summary, attempt.number, d.NoticeTopic.HANG, verdict=verdict)]
    return _inspect(facts, attempt, deadlines)


def _inspect(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    why = inspections.inspection_reason(
        facts, attempt, deadlines, functools.partial(hang.ends_at_if_before, facts, attempt)
    )
    return inspections.inspect_orders(facts, attempt, why, deadlines) if why else []


def _withdraw_hang(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Withdraw the notice of a hang once the job makes progress again."""
    active = attempt.active_notice(d.NoticeTopic.HANG)
    if active is None or suspicion.quiet_since(facts, attempt) <= active.at:
        return []
    why = "the job makes progress again"
    return [d.Notice(deadlines.now_s, why, attempt.number, d.NoticeTopic.HANG, withdrawn=True)]


def _advance_attempt(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Move the attempt on: agents up, nodes prepared, then all ranks at once."""
    if attempt.placed_at is None:
        return placement.gather(facts, attempt, deadlines)
    if attempt.phase is Phase.RUN:
        orders = launch_calls.next_call(facts, attempt, deadlines) or _start_orders(facts, attempt, deadlines)
        orders = orders or fence.fence_orders(facts, attempt, deadlines)
        orders = orders or placement.keep_spares(facts, attempt, deadlines)
        if orders or facts.pool is None or not facts.pool.readies_spares:
            return orders
        return _prepare_orders(facts.spares, attempt, None, deadlines)
    orders = _launch_missing_agents(facts, attempt, deadlines)
    orders += _prepare_orders(facts.gang, attempt, attempt.resume, deadlines)
    orders += rendezvous.probe_orders(facts, attempt, deadlines)
    if orders or not _is_ready(facts, attempt):
        return orders
    return _start_orders(facts, attempt, deadlines)


def _prepare_orders(
    nodes: list[NodeFacts], attempt: AttemptFacts, resume: ResumePoint | None, deadlines: Deadlines
) -> list[Decision]:
    """Make nodes ready. Spares too: the imports of an attempt that needs them are then done."""
    return [
        d.To(
            deadlines.now_s,
            f"attempt {attempt.number} {'needs' if node.ranks else 'may need'} {node.name}",
            node.name,
            Prepare(attempt.number, resume),
        )
        for node in nodes
        if node.agent_state is AgentState.UP
        and node.ready_attempt < attempt.number
        and node.ordered.prepare < attempt.number
    ]


def _is_ready(facts: Facts, attempt: AttemptFacts) -> bool:
    """Tell whether all ranks can be started: every node is set up, and the rendezvous address is known."""
    if any(node.agent_state is not AgentState.UP or node.ready_attempt < attempt.number for node in facts.gang):
        return False
    return rendezvous.is_probing_done(facts, attempt) and isinstance(
        rendezvous.rendezvous_point(facts), rendezvous.RendezvousPoint
    )


def _start_orders(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    waiting = [
        node
        for node in facts.gang
        if node.agent_state is AgentState.UP
        and node.ready_attempt >= attempt.number  # a new agent in place of a dead one is not
        and max(node.started_attempt, node.ordered.start) < attempt.number
    ]
    if not waiting:
        return []
    meeting_point = rendezvous.rendezvous_point(facts)
    assert isinstance(meeting_point, rendezvous.RendezvousPoint), "ranks are started where they can meet"
    why = f"all {len(facts.gang)} nodes are ready"
    return [
        d.To(
            deadlines.now_s, why, node.name,
            Start(attempt.number, meeting_point.address, meeting_point.port, meeting_point.interfaces.get(node.name, "")),
        )
        for node in waiting
    ]  # fmt: skip


def _launch_missing_agents(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Start the agents that are missing; a launch without a report in time is repeated."""
    return [
        d.Launch(deadlines.now_s, f"attempt {attempt.number} needs {node.name}", attempt.number, node.name)
        for node in facts.gang
        if placement.is_launch_due(facts, node, deadlines)
    ]


def _stop(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Stop what is left of the attempt; once nothing of it can still be running, return what follows."""
    over_at = fence.broken_gang_over_at(facts, attempt)
    unclear = [node for node in facts.every_node() if not fence.is_clear(facts, attempt, node, over_at, deadlines)]
    if not unclear or allocation.may_leave_unclear(facts, attempt, unclear, _grace_s(facts, attempt), deadlines):
        return _decide_after_stop(facts, attempt, deadlines)
    return _stop_orders(facts, attempt, unclear, deadlines) or _give_up(facts, attempt, unclear, deadlines)


def _stop_orders(facts: Facts, attempt: AttemptFacts, unclear: list[NodeFacts], deadlines: Deadlines) -> list[Decision]:
    grace_s, may_save = _grace_s(facts, attempt), allocation.may_save_first(facts, attempt)
    allocated_nodes = facts.nodes if facts.queue is not None else None  # nothing can be launched on other nodes now
    orders: list[Decision] = []
    for node in unclear:
        if node.agent_state is AgentState.UP and node.ordered.stop < attempt.number:
            why = f"attempt {attempt.number} is over: {_ending_text(facts, attempt)}"
            orders.append(d.To(deadlines.now_s, why, node.name, Stop(attempt.number, grace_s, may_save)))
        elif (allocated_nodes is None or node.name in allocated_nodes) and placement.is_launch_due(
            facts, node, deadlines
        ):
            why = f"only an agent can confirm that nothing of attempt {attempt.number} is left on {node.name}"
            orders.append(d.Launch(deadlines.now_s, why, attempt.number, node.name))
    return orders


def _grace_s(facts: Facts, attempt: AttemptFacts) -> float:
    """An intact gang (cancel, time limit) gets the user's grace to save a checkpoint; a broken one cannot save anything."""
    assert facts.limits is not None
    verdict = attempt.verdict
    is_intact = verdict is None or attempt.costs_no_restart
    plain_s = facts.limits.stop_grace_s if is_intact else facts.limits.break_grace_s
    return allocation.grace_s(facts, attempt, plain_s)


def _ending_text(facts: Facts, attempt: AttemptFacts) -> str:
    if attempt.verdict is not None:
        return attempt.verdict.kind.value
    if attempt.restart_requested and not facts.is_done:
        return restart_policy.RESTART_REQUESTED
    return "cancelled" if facts.goal is JobGoal.CANCEL else "done"


def _give_up(facts: Facts, attempt: AttemptFacts, unclear: list[NodeFacts], deadlines: Deadlines) -> list[Decision]:
    """End the job when its processes cannot be stopped: two attempts at the same time could corrupt its checkpoints."""
    grace_s = _grace_s(facts, attempt)
    for node in unclear:
        deadline_s = node.ordered.stop_at + grace_s + KILL_S_MAX
        is_stop_ordered = node.agent_state is AgentState.UP and node.ordered.stop == attempt.number
        # Only an agent heard after the deadline could have reported that everything is stopped.
        if is_stop_ordered and deadlines.passed(deadline_s) and node.contact_at >= deadline_s:
            why = f"processes of attempt {attempt.number} on {node.name} survive SIGKILL; check the host"
            return [d.EndJob(deadlines.now_s, why, attempt.number, _job_end(facts))]
    since_s = max(attempt.stop_at or 0.0, attempt.watched_at)
    longest_s = max(UNREACHABLE_S_MAX, *(2.0 * fence.silence_s_max(facts, node) for node in unclear))
    if not deadlines.passed(since_s + grace_s + longest_s):
        return []
    names = ", ".join(node.name for node in unclear)
    why = f"{names} cannot be reached: ranks of attempt {attempt.number} may still run there; check the host"
    return [d.EndJob(deadlines.now_s, f"{_ending_text(facts, attempt)}; {why}", attempt.number, _job_end(facts))]


def _job_end(facts: Facts) -> d.JobEnd:
    """Say how the job ends when it must end now."""
    if facts.is_done:
        return d.JobEnd.SUCCEEDED
    return d.JobEnd.CANCELLED if facts.goal is JobGoal.CANCEL else d.JobEnd.FAILED


def _decide_after_stop(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    if restart_policy.waits_for_checkpoint(facts, attempt, deadlines):
        return []
    unloadable_checkpoint = checkpoints.find_unloadable(facts, attempt, attempt.verdict)
    if unloadable_checkpoint is not None:
        checkpoint, why, is_certain = (
            unloadable_checkpoint.save.number,
            unloadable_checkpoint.why,
            unloadable_checkpoint.is_certain,
        )
        return [d.DistrustCheckpoint(deadlines.now_s, why, attempt.number, checkpoint, is_certain)]
    match restart_policy.decide_next(facts):
        case restart_policy.GiveUp(end, why):
            return [d.EndJob(deadlines.now_s, why, attempt.number, end)]
        case restart_policy.RequeueJob(avoid, why):
            return [d.Requeue(deadlines.now_s, why, attempt.number, avoid)]
        case restart_policy.RestartAttempt(not_before_s, why):
            if not deadlines.passed(not_before_s):
                return []
            return _compare(facts, attempt, deadlines) or _begin(facts, attempt, why, deadlines)


def _compare(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Compare the checkpoint that the next attempt is to begin from, once; nothing begins before the answer."""
    checkpoint = facts.checkpoint_choice.checkpoint
    number = checkpoint.number if checkpoint is not None else 0
    if attempt.compare_ordered_at is None and attempt.compared_checkpoint != number:
        checkpoint_name = checkpoint.main if checkpoint is not None else "nothing"
        deep = checkpoints.needs_deep_compare(facts, attempt)
        return [
            d.CompareCheckpoint(
                deadlines.now_s,
                f"before attempt {attempt.number + 1}: {checkpoint_name}",
                attempt.number,
                number,
                deep,
            )
        ]
    if attempt.compare_ordered_at is None or not attempt.checkpoint_to_compare:
        return []
    if not deadlines.passed(attempt.compare_ordered_at + COMPARE_S_MAX):
        return []
    compared = facts.checkpoints.get(attempt.checkpoint_to_compare)
    why = (
        f"{compared.main if compared else 'its checkpoint'} could not be read within {COMPARE_S_MAX / 3600:g} hours: "
        "check the disk, then run orch resume"
    )
    return [d.EndJob(deadlines.now_s, why, attempt.number, d.JobEnd.FAILED)]


def _begin(facts: Facts, attempt: AttemptFacts, why: str, deadlines: Deadlines) -> list[Decision]:
    if attempt.compare_ordered_at is not None:
        return []
    passed_over = facts.checkpoint_choice.skipped
    return [d.BeginAttempt(deadlines.now_s, why, attempt.number + 1, facts.checkpoint, passed_over)]
