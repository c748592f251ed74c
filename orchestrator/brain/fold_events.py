"""Events, folded into the facts. Nothing is judged here.

A report of an old attempt proves that its sender is alive, and nothing else. Orders are void when their connection ends, and are
given again when the agent is back. Replaying a journal gives the same facts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from orchestrator.brain import fold_decisions, fold_heartbeats, replicas, stragglers
from orchestrator.brain.diagnosis import desync, suspicion
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import AttemptFacts, Facts, JobGoal, News, Phase
from orchestrator.brain.model.node_facts import (
    AgentLoss,
    AgentState,
    HostBusy,
    NodeFacts,
    Orders,
    ScriptEnd,
    SetupFailure,
)
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.brain.scheduling import allocation, checkpoint_trust, host_faults
from orchestrator.core import observations
from orchestrator.core.checkpoints.resume_choice import ResumeOverride
from orchestrator.core.errors import Fault
from orchestrator.core.wire import reports


def fold(facts: Facts, news: News) -> None:
    """Fold one event or journaled decision into the facts."""
    facts.last_event_at = max(facts.last_event_at, news.at)
    _FOLDS[type(news)](facts, news)


def _planned(facts: Facts, news: e.Planned) -> None:
    if facts.end is not None:
        fold_decisions.archive_attempt(facts)  # before its ranks are forgotten
    earlier_nodes = {node.name: node for node in facts.every_node()}
    facts.limits = news.limits
    facts.pool = news.pool
    if facts.queue is not None and facts.end is None and facts.attempt is not None:
        allocation.fold_planned(facts, news)
        return
    facts.nodes = {plan.name: earlier_nodes.pop(plan.name, NodeFacts(plan.name, plan.ranks)) for plan in news.nodes}
    facts.leaving = earlier_nodes
    for plan in news.nodes:
        facts.nodes[plan.name].ranks = plan.ranks
    facts.ranks = {rank: RankFacts(rank, plan.name) for plan in news.nodes for rank in plan.ranks}
    facts.forget_signs()
    if news.pool is not None:
        facts.ranks = fold_decisions.unplaced_ranks(news.pool)
        facts.last_hosts = tuple(name for name in facts.last_hosts if name in facts.nodes)


def _supervisor_started(facts: Facts, news: e.SupervisorStarted) -> None:
    for node in facts.every_node():
        if node.agent_state is not AgentState.ABSENT:
            _void_orders(node)
        node.contact_at = news.at
    if facts.attempt is not None:
        facts.attempt.watched_at = news.at
        # Files may have been damaged meanwhile
        facts.attempt.compare_ordered_at = facts.attempt.compared_checkpoint = None
    desync.forget_counts(facts)
    for rank in facts.ranks.values():
        rank.sign_at = max(rank.sign_at, news.at) if rank.rank_state is RankState.ALIVE else rank.sign_at
        rank.state_at = news.at
        facts.note_signs(rank)


def _void_orders(node: NodeFacts) -> None:
    """Void a node's orders: those under way may never have arrived; they are given again when the agent is back."""
    node.agent_state = AgentState.SILENT
    node.ordered = Orders()
    node.is_fence_uncertain = True


def _agent_up(facts: Facts, news: e.AgentUp) -> None:
    node = facts.node(news.node)
    if node is None:
        return
    attempt_number = facts.attempt.number if facts.attempt else 0
    is_new = node.incarnation != news.incarnation
    if node.incarnation and is_new:
        _note_agent_loss(facts, node, "its agent died with its ranks; a new one is up", news.at)
    _void_orders(node)
    node.agent_state = AgentState.UP
    node.agent_present = True
    node.incarnation = news.incarnation
    node.contact_at = news.at
    node.launch_failures = 0
    node.gpus = () if is_new else node.gpus
    node.lost_earlier, node.host_busy = "", None
    if node.excluded == node.launch_fault:  # the refused launch is fixed; what the agent found is not
        node.excluded = None
    node.launch_fault = None
    # While it sets the node up no script runs, but one will begin
    will_run = facts.runs_launch_script and not is_new and news.ready < node.may_run_attempt
    if news.running == 0 and not will_run:
        _note_cleared(node, node.may_run_attempt, news.at)
    node.ready_attempt = news.ready
    if news.ready == attempt_number:
        node.rendezvous.address, node.rendezvous.port = news.address, news.port
    if news.running == attempt_number and news.ranks and node.started_attempt != attempt_number:
        _ranks_started(facts, node, attempt_number, tuple(seen.pid for seen in news.ranks), news.at)


def _agent_disconnected(facts: Facts, news: e.AgentDisconnected) -> None:
    node = facts.node(news.node)
    if node is None or node.agent_state is not AgentState.UP:
        return
    attempt_number = facts.attempt.number if facts.attempt else 0
    dismissed = news.left and node.ordered.leave and node.is_clear(attempt_number)
    _void_orders(node)
    if dismissed:
        node.agent_state = AgentState.ABSENT
        node.agent_present = False


def _agent_died(facts: Facts, news: e.AgentDied) -> None:
    node = facts.node(news.node)
    if node is None:
        return
    node.agent_present = False
    if node.agent_state is AgentState.ABSENT:
        return
    if node.agent_state is AgentState.LAUNCHING:
        node.launch_failures += 1
        node.launch_fault = Fault(node.name, news.evidence)
        host_faults.readmit(facts)
    else:
        _note_agent_loss(facts, node, news.evidence, news.at)
    _void_orders(node)
    node.agent_state = AgentState.ABSENT


def _note_agent_loss(facts: Facts, node: NodeFacts, how: str, at: float) -> None:
    """Note that an agent has died, if ranks of the current attempt died with it."""
    attempt = facts.attempt
    if attempt is not None and node.may_run_attempt == attempt.number and facts.is_unfinished(node):
        node.agent_loss = AgentLoss(how, at)


def _launch_failed(facts: Facts, news: e.LaunchFailed) -> None:
    node = facts.node(news.node)
    if node is None or node.agent_state is AgentState.UP:
        return
    node.agent_state = AgentState.ABSENT
    if news.trouble is observations.Retryable.BUSY:
        node.host_busy = HostBusy(news.reason, news.at)
        host_faults.readmit(facts)
        _note_queued(facts, news.at)
        return
    node.host_busy = None
    node.launch_failures += 1
    what = f"{news.stage}: {news.reason}" if news.stage else news.reason
    node.launch_fault = Fault(node.name, what, news.fix)
    if news.trouble is observations.Retryable.PERMANENT and not node.incarnation:
        node.excluded = node.launch_fault  # a host that has been up may be booting
    host_faults.readmit(facts)


def _queue_seen(facts: Facts, news: e.QueueSeen) -> None:
    facts.jobs_ahead = news.ahead
    _note_queued(facts, news.at)


def _note_queued(facts: Facts, at: float) -> None:
    if facts.attempt is not None:
        facts.attempt.queued_at = at


def _from_node(facts: Facts, news: e.FromNode) -> None:
    """Fold a report: its sender lives. All else counts only in the current attempt, but that nothing runs any more, and the states
    of GPUs."""
    node, report, attempt = facts.node(news.node), news.report, facts.attempt
    if node is None:
        return
    node.contact_at = max(node.contact_at, news.at)
    is_current = attempt is not None and attempt.number == report.attempt and node.name in facts.nodes
    match report:
        case reports.Stopped():
            _stopped(facts, node, report, news.at)
        case reports.GpusChanged():
            host_faults.fold_gpus(facts, node, report.gpus)
        case _ if not is_current:
            pass
        case reports.Prepared():
            _prepared(facts, node, report, news.at)
        case reports.Probed(attempt=number) if node.rendezvous.probed < number:
            # The first answer counts: the first node stops listening once ranks are started.
            rendezvous = node.rendezvous
            rendezvous.probed, rendezvous.reached, rendezvous.probe_failures = (
                number,
                report.reached,
                report.missed,
            )
        case reports.PrepareFailed() if node in facts.spares:
            node.excluded = Fault(node.name, report.reason)
        case reports.PrepareFailed():
            node.setup_failure = SetupFailure(report.reason, report.tail, report.save, report.is_final, report.fix)
        case reports.LaunchEnded():
            node.script_end = ScriptEnd(report.calls, report.code, report.tail)
        case reports.Started():
            _ranks_started(facts, node, report.attempt, report.pids, news.at)
        case reports.Exited():
            _exited(facts, report, news.at)
        case reports.Heartbeat():
            _heartbeat(facts, report, news.at)
        case reports.Inspected():
            _inspected(facts, node, report, news.at)


def _prepared(facts: Facts, node: NodeFacts, news: reports.Prepared, at: float) -> None:
    node.ready_attempt = news.attempt
    if news.memory_fault and node.ranks and facts.attempt is not None:
        facts.attempt.memory_faults[node.name] = news.memory_fault
    if news.call > node.launcher_call:
        node.launcher_call, node.launcher_call_at = news.call, at
    rendezvous = node.rendezvous
    rendezvous.port = news.port
    if news.call <= 1:  # a later call uses the address that the first call found
        rendezvous.address, rendezvous.addresses = news.address, news.addresses


def _ranks_started(facts: Facts, node: NodeFacts, attempt: int, pids: tuple[int, ...], at: float) -> None:
    node.started_attempt = attempt
    for number, pid in zip(node.ranks, pids, strict=False):
        rank = facts.ranks[number]
        rank.pid = pid
        if rank.rank_state is RankState.WAITING:
            rank.rank_state = RankState.ALIVE
            rank.sign_at = rank.state_at = rank.beat_at = at
            facts.living_ranks = None
            facts.note_signs(rank)
    current = facts.attempt
    if current is not None and current.running_at is None and _all_started(facts, attempt):
        current.running_at = at


def _all_started(facts: Facts, attempt: int) -> bool:
    return all(node.started_attempt == attempt for node in facts.nodes.values() if node.ranks)


def _exited(facts: Facts, news: reports.Exited, at: float) -> None:
    rank = facts.ranks.get(news.rank)
    if rank is None or rank.rank_state is RankState.EXITED:
        return
    rank.rank_state, facts.living_ranks = RankState.EXITED, None
    facts.exited_count += 1
    rank.code, rank.signal, rank.failure, rank.is_oom = news.code, news.signal, news.failure, news.oom
    rank.died_at, rank.gpu_users, rank.memory_full = at, news.gpu_users, news.memory_full
    is_stopping = facts.attempt is not None and facts.attempt.phase is Phase.STOP
    rank.stop_ordered = news.ordered or is_stopping
    rank.beat = replace(rank.beat, alone=news.alone, progress=news.progress or rank.beat.progress)
    rank.training = news.training or rank.training
    if rank.ended_well:
        facts.ended_well_at = max(facts.ended_well_at or 0.0, at)
    if news.steps > rank.steps:
        rank.steps, rank.step_at = news.steps, at
        facts.note_signs(rank)


def _heartbeat(facts: Facts, news: reports.Heartbeat, at: float) -> None:
    for beat in news.ranks:
        rank = facts.ranks.get(beat.rank)
        if rank is not None and rank.rank_state is RankState.ALIVE:
            median_s = rank.beat.median_step_s
            has_new_work_time = beat.own_work_s is not None and beat.own_work_s != rank.beat.own_work_s
            fold_heartbeats.fold(rank, beat, at, facts.attempt.watched_at if facts.attempt else 0.0)
            facts.longest_pause_s = max(facts.longest_pause_s, rank.pause_s)
            facts.note_signs(rank)
            if rank.beat.median_step_s != median_s:
                facts.note_median(median_s, rank.beat.median_step_s)
            if beat.groups:
                if beat.groups != rank.group_keys:
                    rank.group_keys = beat.groups
                    facts.group_members.clear()
                desync.record_counts(facts, rank, beat.groups, beat.collective_counts, at)
            if beat.parameter_sums:
                replicas.record_sums(facts, rank, beat.parameter_sums)
            if has_new_work_time:
                stragglers.compare_work(facts, rank, at)


def _stopped(facts: Facts, node: NodeFacts, news: reports.Stopped, at: float) -> None:
    _note_cleared(node, min(news.attempt, node.may_run_attempt), at)
    attempt = facts.attempt
    if attempt is None or attempt.number != news.attempt or attempt.phase is Phase.STOP:
        return
    is_done = not facts.runs_script(node) and all(rank.ended_well for rank in facts.ranks_on(node.name))
    if news.how != "ended" and not is_done:  # without an order to stop: the attempt cannot continue without these ranks
        fenced_text = "it had lost the supervisor and made no progress, so its agent stopped its ranks"
        how = fenced_text if news.how == "fenced" else "its agent stopped its ranks without an order"
        node.agent_loss = AgentLoss(how, at)


def _note_cleared(node: NodeFacts, attempt: int, at: float) -> None:
    if node.cleared_attempt < attempt:
        node.cleared_attempt, node.cleared_at = attempt, at


def _inspected(facts: Facts, node: NodeFacts, news: reports.Inspected, at: float) -> None:
    node.inspection_answered = max(node.inspection_answered, news.inspection)
    quiet_since_s = suspicion.quiet_since(facts, cast(AttemptFacts, facts.attempt))
    for inspection in news.ranks:
        rank = facts.ranks.get(inspection.rank)
        if rank is not None and rank.rank_state is RankState.ALIVE:
            if fold_heartbeats.has_entered_new_collective(rank, inspection, quiet_since_s):
                rank.collective_at = at
            rank.inspection, rank.inspected_at = inspection, at
            facts.uncountable_groups.update(inspection.mixed)


def _checkpoint_compared(facts: Facts, news: e.CheckpointCompared) -> None:
    attempt = facts.attempt
    if attempt is not None and attempt.number == news.attempt and attempt.checkpoint_to_compare == news.save:
        attempt.compared_checkpoint, attempt.compare_ordered_at = (news.save if not news.fault else -1), None


def _cancel_requested(facts: Facts, news: e.CancelRequested) -> None:
    facts.last_request = max(facts.last_request, news.request)
    if facts.end is None:
        facts.goal = JobGoal.CANCEL
        facts.cancel_reason = facts.cancel_reason or "cancelled by the user"


def _restart_requested(facts: Facts, news: e.RestartRequested) -> None:
    """Fold a restart request; what follows an attempt that is already over does not depend on it."""
    facts.last_request = max(facts.last_request, news.request)
    attempt = facts.attempt
    if facts.end is None and attempt is not None and attempt.phase is not Phase.STOP:
        attempt.restart_requested = True


def _inspect_requested(facts: Facts, news: e.InspectRequested) -> None:
    facts.last_request = max(facts.last_request, news.request)
    facts.inspect_requested = news.request


def _resume_requested(facts: Facts, news: e.ResumeRequested) -> None:
    facts.last_request = max(facts.last_request, news.request)
    if facts.end is None:
        return
    facts.end, facts.end_why, facts.ended_at = None, "", None
    facts.goal, facts.cancel_reason = JobGoal.RUN, ""
    facts.run_began_at = facts.requeued_at = facts.allocation_end = None
    fold_decisions.archive_attempt(facts)
    facts.restarts_spent = 0
    facts.resumed_after = facts.attempt.number if facts.attempt else 0
    if facts.attempt is not None:
        facts.attempt.stop_at = facts.attempt.watched_at = news.at
        facts.attempt.compare_ordered_at, facts.attempt.compared_checkpoint = None, None
    facts.resume_overrides += (ResumeOverride(news.save, facts.resumed_after),) if news.save else ()
    facts.best_step = (facts.checkpoint.step or 0) if facts.checkpoint else 0
    for node in facts.every_node():
        node.clear_faults()
        node.ordered.stop, node.ordered.leave = 0, False
        node.agent_state = AgentState.ABSENT if node.agent_state is AgentState.LAUNCHING else node.agent_state


_FOLDS: dict[type[Any], Any] = {
    e.Planned: _planned,
    e.SupervisorStarted: _supervisor_started,
    e.AgentUp: _agent_up,
    e.AgentDisconnected: _agent_disconnected,
    e.AgentDied: _agent_died,
    e.LaunchFailed: _launch_failed,
    e.QueueSeen: _queue_seen,
    e.FromNode: _from_node,
    e.InspectRequested: _inspect_requested,
    e.CheckpointChanged: checkpoint_trust.fold_checkpoint_changed,
    e.CheckpointCompared: _checkpoint_compared,
    e.ResumedElsewhere: checkpoint_trust.fold_resumed_elsewhere,
    e.CheckpointRead: checkpoint_trust.fold_checkpoint_read,
    e.CancelRequested: _cancel_requested,
    e.RestartRequested: _restart_requested,
    e.ResumeRequested: _resume_requested,
    **allocation.FOLDS,
    **fold_decisions.FOLDS,
}
