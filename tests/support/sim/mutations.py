"""Would the oracles notice a brain that is wrong, or rules of saves that it shares? Mutations made by hand, each of which a
stated night must kill.

A mutation replaces a piece of one function's source, or a constant. A piece that is no longer there fails the test:
the list is kept in step with the code. `python -m tests.support.sim.mutations` looks for the nights anew and prints them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from orchestrator import brain
from orchestrator.core import checkpoints

from .clean import check_clean, clean_night
from .clean_desync import CASES as DESYNC_CASES
from .clean_desync import check_desync, desync_night
from .clean_hang import CASES as HANG_CASES
from .clean_hang import hang_night
from .clean_pool import check_pool, pool_night
from .clean_queue import check_queue, queue_night
from .ledger import Violation
from .named import NAMED
from .night import Night, random_night
from .world import World

SEARCH_MAX = 500
EVENTS_MAX = 15_000
"""Where a mutant goes round in circles. The nights of KILLERS have up to 6,000 events with the code as it is."""

POOL_CASES = 42
QUEUE_CASES = 38


@dataclass(frozen=True, slots=True)
class Mutation:
    """`where`: module and name inside the brain or the rules of saves; `old` becomes `new` in its source. A constant has no
    `old`."""

    name: str
    where: str
    old: str
    new: str


MUTATIONS = (
    Mutation("no fence wait", "fence.is_clear", "return deadlines.passed(last_sign_s + wait_s)", "return True"),
    Mutation("fence wait too short", "fence.is_clear", "else silence_s_max(facts, node)", "else silence_s_max(facts, node) * 0.4"),
    Mutation("longer times of agents are not waited for", "fence._agent_timeout_s", "return max(base_s, node.fence_s if", "return max(base_s, base_s if"),
    Mutation("time alone is not waited for", "fence._agent_timeout_s", "max(node.fence_s, node.startup_timeout_s)", "node.fence_s"),
    Mutation("what an agent was told ends with its line", "fold_events._void_orders", "node.is_fence_uncertain = True", "node.fence_s = node.startup_timeout_s = 0.0"),
    Mutation("fence wait without proof of a break", "fence.broken_gang_over_at", "return None\n    return max", "broken_at = 0.0\n    return max"),
    Mutation("a silent node is over before its agent's time is", "fence._time_since_last_step", "held_s = _agent_timeout_s(", "held_s = 0.4 * _agent_timeout_s("),
    Mutation("nobody need see that the gang stands still", "fence.is_proven_over", "known_at >= time.fenced_at and", ""),
    Mutation("an agent without a line for long has no longer time", "fence._time_since_last_step", "is_unheard or facts.stepped_at > node.contact_at + SUPERVISOR_AWAY_STEPS_S", "is_unheard"),
    Mutation("what came before the supervisor is no matter", "fence._time_since_last_step", "is_unheard or facts", "facts"),
    Mutation("an absent agent is taken for a clear node", "fence.is_clear", "if node.agent_state is AgentState.UP:\n        return False", "if node.agent_state is not AgentState.UP:\n        return True"),
    Mutation("a connected node is taken for clear", "fence.is_clear", "return False\n    if is_proven_over", "return True\n    if is_proven_over"),
    Mutation("budget off by one", "restart_policy._decide_restart", "spent > facts.limits.restarts_max", "spent > facts.limits.restarts_max + 1"),
    Mutation("restart.max 0 restarts after progress", "restart_policy._decide_restart", "facts.limits.restarts_max == 0", "False"),
    Mutation("progress costs nothing ever", "fold_decisions.archive_attempt", "facts.restarts_spent += 0 if has_progressed or attempt.costs_no_restart else 1", "pass"),
    Mutation("every step counts as progress", "facts.Facts.has_progressed", "> self.best_step", "> 0"),
    Mutation("retry is ignored", "restart_policy._decide_restart", "if not verdict.retry:", "if False:"),
    Mutation("a cancel is forgotten at the end", "restart_policy._decide_restart", "facts.goal is JobGoal.CANCEL:", "False:"),
    Mutation("a resume keeps the spent budget", "fold_events._resume_requested", "facts.restarts_spent = 0", "facts.restarts_spent = facts.restarts_spent"),
    Mutation("orders are not void when a line breaks", "fold_events._void_orders", "node.ordered = Orders()", "pass"),
    Mutation("stops are forgotten after a reconnect", "fold_events._void_orders", "node.ordered = Orders()", "node.ordered = Orders(stop=node.ordered.stop)"),
    Mutation("a start before all are ready", "brain._is_ready", "if any(", "if all("),
    Mutation("ranks meet at the last node", "rendezvous.rendezvous_point", "first, *others = facts.gang", "*others, first = facts.gang"),
    Mutation("who has left early is not named", "crash._crash_verdict", "blamed = ended if", "blamed = blamed if"),
    Mutation("a victim is taken for the culprit", "crash.looks_like_victim", "return bool(_VICTIM_TYPES.fullmatch(rank.failure.type) and _VICTIM.search(_message(rank)))", "return False"),
    Mutation("a silent node is no suspect", "crash.judge", "silent_nodes = [", "silent_nodes = [] and ["),
    Mutation("no grace after a supervisor's death", "fold_events._supervisor_started", "node.contact_at = news.at", "pass"),
    Mutation("progress does not speak for a silent node", "node_lost._is_silent_too_long", "max(node.contact_at, stepped_at)", "node.contact_at"),
    Mutation("log lines speak for a silent node", "node_lost._is_silent_too_long", "stepped_at)", "deadlines.now_s)"),
    Mutation("silence is for ever", "node_lost.judge", "_is_silent_too_long(facts, node, stepped_at, deadlines)", "False"),
    Mutation("a new agent hides its dead ranks", "fold_events._agent_up", "if node.incarnation and is_new:", "if False:"),
    Mutation("an agent that sets a script up has nothing that may begin", "fold_events._agent_up", "facts.runs_launch_script and not is_new and", "False and not is_new and"),
    Mutation("a gone agent hides its dead ranks", "fold_events._agent_died", "_note_agent_loss(facts, node, news.evidence, news.at)", "pass"),
    Mutation("fenced ranks count as done", "rank_facts.RankFacts.ended_well", "not self.stop_ordered and self.code == 0", "(self.stop_ordered or self.code == 0)"),
    Mutation("one done rank is the whole job", "facts.Facts.are_ranks_done", "self.exited_count == len(self.ranks) and all(", "any("),
    Mutation("why is empty", "brain._launch_missing_agents", 'f"attempt {attempt.number} needs {node.name}"', '""'),
    Mutation("a start has no deadline", "diagnose._start_timeout_verdict", "not deadlines.passed(since_s + facts.limits.start_timeout_s)", "deadlines.now_s < since_s + facts.limits.start_timeout_s"),
    Mutation("a start never takes too long", "diagnose._start_timeout_verdict", "attempt.running_at is not None", "True"),
    Mutation("hangs are not seen", "hang.is_stalled", "silence_s is None", "True"),
    Mutation("a late answer is none", "hang.is_stalled", "inspection_answered == attempt.inspection - 1 for", "inspection_answered < 0 for"),
    Mutation("a stopped rank is not seen", "hang._judge_stopped_processes", '("T", STOPPED_S_MAX,', '("Z", STOPPED_S_MAX,'),
    Mutation("a short pause is a hang", "hang.STOPPED_S_MAX", "", "0.0"),
    Mutation("no back-off deadline", "brain._decide_after_stop", "not deadlines.passed(not_before_s)", "deadlines.now_s < not_before_s"),
    Mutation("no time limit", "diagnose._time_limit_verdict", "limits.time_limit_s is None", "True"),
    Mutation("the same failure is never recognised", "repeated_failure._is_same_point", "return as_far or past.failed_step == verdict.step", "return False"),
    Mutation("unreachable nodes are waited for without end", "brain.UNREACHABLE_S_MAX", "", "1e9"),
    Mutation("a launch that is not heard of is not repeated", "placement.is_launch_due", "return deadlines.passed(node.launched_at + LAUNCH_S_MAX)", "return False"),
    Mutation("a fatal signal before any step is never recognised", "repeated_failure._is_same_point", "(FailureCause.SIGNAL,", "(FailureCause.SIGNAL, FailureCause.FATAL_SIGNAL,"),
    Mutation("who handles an exception is not told from who waits for it", "hang.find_suspects", "if raised and", "if False and"),
    Mutation("stacks are taken again and again", "brain._judge_hang", "attempt.inspected_at is None or attempt.inspected_at < verdict.since_s", "True"),
    Mutation("the facts hold a wish", "brain._advance_attempt", "if attempt.phase is Phase.RUN:", "facts.restarts_spent += attempt.phase is Phase.RUN\n    if attempt.phase is Phase.RUN:"),
    Mutation("a folded beat is stamped anew", "fold_heartbeats.coalesce_heartbeats", "getattr(rank, name) for name in _SIGN_TIMES", "at if name == 'sign_at' else getattr(rank, name) for name in _SIGN_TIMES"),
    Mutation("beats that were written down never reach the journal", "brain.Brain.__init__", "else heartbeat_at", "else {}"),
    Mutation("a host that hangs is never told from its script", "repeated_failure._may_be_host_fault", "and on_one", "and False"),
    Mutation("coming equally far is never recognised", "repeated_failure._are_equally_far", "return bool(count)", "return False"),
    Mutation("one rank that is alone speaks for all", "notices.independent_ranks_fault", "not all(", "not any("),
    Mutation("ranks are alone from the first step on", "notices.INDEPENDENT_STEPS", "", "1"),
    Mutation("ranks that are alone are not named", "notices._is_independent", "rank.beat.alone is not None", "False"),
    Mutation("that ranks are alone is not taken back", "notices.decide", "if attempt.active_notice(NoticeTopic.ALONE) and not independent:", "if False:"),
    Mutation("a loss that stays infinite is let be", "divergence.judge", "or rank is None:", "or True:"),
    Mutation("what was saved after the last finite loss is begun from", "divergence.sound_step", "attempt.call_step + steps", "10**9"),
    Mutation("the same divergence is rolled back again", "divergence.judge", "if is_same and was_finite and sound <= (past.failed_step or 0):", "if False:"),
    Mutation("a loss that is not finite is not named", "notices._loss_notice", "if (is_odd or bool(norm)) ==", "if True or (is_odd or bool(norm)) =="),
    Mutation("that a loss is not finite is never taken back", "notices._loss_notice", "if (is_odd or bool(norm)) ==", "if active or (is_odd or bool(norm)) =="),
    Mutation("a rank that drifts is not named", "replicas.notice", "if texts:", "if False:"),
    Mutation("only the last step of a heartbeat is compared", "replicas.notice", "dict.fromkeys(facts.complete_sums)", "facts.complete_sums[-1:]"),
    Mutation("ranks are said to hold nothing in common before all have told", "replicas.notice", "complete >= len(facts.ranks)", "True"),
    Mutation("ranks are replicas after one step", "replicas.AGREED_MIN", "", "1"),
    Mutation("that no two ranks hold the same is not said", "replicas._none_notice", "if len(facts.ranks) < 2 or", "if True or"),
    Mutation("a node without room in memory is not named", "notices._memory_notice", "if not faults or", "if True or"),
    Mutation("that a node has no room in memory is said again", "notices._memory_notice", " or attempt.last_notice(NoticeTopic.MEMORY)", ""),
    Mutation("ranks that end well behind a traceback are not named", "notices.decide", "(doubts := find_contradictions(facts))", "(doubts := [])"),
    Mutation("busy hosts are not asked again", "placement._is_known_busy", "not deadlines.passed(busy_retry_at(facts))", "True"),
    Mutation("busy hosts are asked one by one", "placement._is_known_busy", " or node.host_busy.at < facts.busy_round_at", ""),
    Mutation("busy hosts are asked as often after hours", "placement.BUSY_PAUSE_SHARE", "", "0.0"),
    Mutation("hosts are held while others are busy", "placement.is_short", "return not deadlines.passed(busy_retry_at(facts))", "return False"),
    Mutation("jobs that came first are no matter", "placement.gather", "facts.jobs_ahead or is_short(facts, deadlines)", "is_short(facts, deadlines)"),
    Mutation("a host that boots is given up for good", "fold_events._launch_failed", " and not node.incarnation", ""),
    Mutation("an excluded host is launched again", "placement.is_launch_due", "node.excluded or ", ""),
    Mutation("an excluded host is kept beside the gang", "placement.keep_spares", ", *(node for node in idle if node.excluded)", ""),
    Mutation("a dismissed host is used", "placement._is_ready", " and not node.ordered.leave", ""),
    Mutation("ranks move about", "placement._choose_hosts", "facts.last_hosts[: pool.nodes]", "()"),
    Mutation("hosts are taken as they come up", "placement._is_earlier_host_coming", "node.agent_state is AgentState.LAUNCHING", "False"),
    Mutation("there are no spares", "placement._launch_orders", "facts.pool.spares + (", "0 + ("),
    Mutation("spares are launched when a line breaks", "placement._is_coming", "not deadlines.passed(node.contact_at + wait_s_max)", "False"),
    Mutation("a lost host is relied upon", "placement._is_coming", "node.lost_earlier or node.excluded", "node.excluded"),
    Mutation("a host that was launched in vain is hoped for", "placement._is_available_soon", " or node.launch_failures >= LAUNCH_FAILURES_MAX", ""),
    Mutation("spares are not made ready", "brain._advance_attempt", "_prepare_orders(facts.spares, attempt, None, deadlines)", "[]"),
    Mutation("setup lines run on spares beside ranks", "brain._advance_attempt", " or not facts.pool.readies_spares", ""),
    Mutation("a spare that cannot be made ready is kept", "fold_events._from_node", "if node in facts.spares:", "if False:"),
    Mutation("surplus hosts are kept", "placement.keep_spares", "*ready[facts.pool.spares :], ", ""),
    Mutation("a lost host is waited for without end", "placement._lost_hosts_verdict", "not deadlines.passed(_return_limit_at(attempt, node, facts.limits.node_timeout_s))", "True"),
    Mutation("a lost host is not waited for", "placement._lost_hosts_verdict", "not deadlines.passed(_return_limit_at(attempt, node, facts.limits.node_timeout_s))", "False"),
    Mutation("other hosts are not thought of", "placement.verdict", "_count_available(facts, deadlines) >= pool.nodes", "False"),
    Mutation("hosts that have not answered are no matter", "placement.verdict", "launching and not deadlines.passed(max(launching) + LAUNCH_S_MAX)", "False"),
    Mutation("too few hosts are waited for without end", "placement.verdict", "usable >= pool.nodes or (", "True or ("),
    Mutation("a slow host is relied on", "placement._is_coming", "min(wait_s_max, LAUNCH_S_MAX)", "LAUNCH_S_MAX"),
    Mutation("launches in vain are never forgotten", "fold_decisions._begin_attempt", "node.launch_failures = 0", "pass"),
    Mutation("waiting for hosts is starting", "diagnose._start_timeout_verdict", " or placement.is_queued(facts)", ""),
    Mutation("the end of waiting is the beginning of time", "diagnose._start_timeout_verdict", "max(attempt.watched_at, attempt.queued_at, attempt.call_at)", "attempt.watched_at"),
    Mutation("waiting for hosts is running", "fold_decisions._begin_attempt", "facts.ranks = unplaced_ranks(facts.pool)", "facts.ranks = unplaced_ranks(facts.pool)\n        facts.run_began_at = facts.run_began_at or news.at"),
    Mutation("ranks meet where some can come", "rendezvous.rendezvous_point", "if all(interface", "if any(interface"),
    Mutation("ranks meet over any interface", "brain._start_orders", 'meeting_point.interfaces.get(node.name, "")', '""'),
    Mutation("ranks start before all have probed", "rendezvous.is_probing_done", "all(node.rendezvous.probed == attempt.number for node in others)", "True"),
    Mutation("who cannot meet is tried again", "fold_decisions._note_missing", "verdict.signature.cause is d.FailureCause.UNREACHABLE", "False"),
    Mutation("the first node is never the one apart", "rendezvous._is_first_cut_off", "(len(others) > 1 or is_repeated)", "False"),
    Mutation("who accused the one apart is not forgiven", "fold_decisions._exclude_unreachable", "facts.nodes[earlier_verdict.node].excluded = None", "pass"),
    Mutation("a host that is never ready is tried again", "fold_decisions._note_missing", "(verdict.kind, verdict.node) == (d.VerdictKind.START_TIMEOUT, node.name)", "False"),
    Mutation("an unfit host is tried again", "fold_decisions._note_missing", "elif node.setup_failure is not None and not node.setup_failure.save and has_other_hosts:", "elif False:"),
    Mutation("a host whose copy of a save is bad is done without", "fold_decisions._note_missing", " and not node.setup_failure.save", ""),
    Mutation("no checkpoint on its way is waited for", "restart_policy.waits_for_checkpoint", "bool(sending)", "False"),
    Mutation("checkpoints on their way are waited for without end", "restart_policy.FETCH_S_MAX", "", "1e9"),
    Mutation("a lost host's checkpoint is waited for", "restart_policy._may_send", "if node is None or fence.is_proven_over(facts, node, deadlines):\n        return False\n    return node.agent_state is AgentState.UP or not deadlines.passed(node.contact_at + facts.limits.node_timeout_s)", "return True"),
    Mutation("one look is enough", "inspections.INSPECTIONS_MIN", "", "1"),
    Mutation("ranks are looked at once", "inspections._silence_reason", "if number and not", "if number or not"),
    Mutation("no rank is let be", "stall_timeout.IDLE_S_MAX", "", "5.0"),
    Mutation("patience is for ever", "stall_timeout.has_expired", "return heard_s", "return False and heard_s"),
    Mutation("log lines hide a hang", "suspicion.DELAY_FACTOR_MAX", "", "1e9"),
    Mutation("log lines hide a hang before the first step", "suspicion.stalled_since", "else is_waited_for", "else False"),
    Mutation("a start is looked at when nothing is heard", "suspicion.quiet_since", "since_s + DELAY_FACTOR_MAX * silence_s", "since_s + (DELAY_FACTOR_MAX if has_stepped(facts) else 1e9) * silence_s"),
    Mutation("no silence is suspicious", "suspicion.suspicious_silence_s", "return min(max(silence_s,", "return 1e9 + min(max(silence_s,"),
    Mutation("the usual time of a step is no matter", "suspicion.suspicious_silence_s", "silence_s = USUAL_STEPS_FACTOR * usual", "silence_s = 60.0"),
    Mutation("the usual time of a backward pass is no matter", "suspicion.suspicious_silence_s", "min(START_SUSPECT_S, USUAL_STEPS_FACTOR * usual_s)", "START_SUSPECT_S"),
    Mutation("backward passes do not speak for a gang", "suspicion.gang_progress_at", "else facts.passed_at", "else 0.0"),
    Mutation("whoever computes on its own hangs", "stall_timeout.timeout_s", "are_at_work = all(", "are_at_work = False and all("),
    Mutation("a rank that serves hangs", "hang._serves_others", "if rank.steps or (", "if True or ("),
    Mutation("who has not entered a collective is not missed", "collectives._is_behind", "number is not None and number < top", "False"),
    Mutation("who shows no stack has not come", "hang._judge_rendezvous", "if _has_rank_without_stack(facts, attempt)", "if False"),
    Mutation("who shows no stack is waited for without end", "hang._judge_rendezvous", "and not deadlines.passed(due_s + NO_STACK_S_MAX)", ""),
    Mutation("who waits in an earlier collective is missed", "collectives._is_in", 'inspection.why == f"in {collective.what}"', "False"),
    Mutation("different collectives are taken for the same", "collectives._sides", "setdefault((one.what, ", 'setdefault(("", '),
    Mutation("the odd one is taken for the right one", "collectives._sides", "key=lambda side: (len(side.ranks),", "key=lambda side: (-len(side.ranks),"),
    Mutation("a cut between ranks is a hang at once", "hang._is_proven", "case NoneMissing() | Undetermined():\n            return False", "case NoneMissing() | Undetermined():\n            return True"),
    Mutation("a thread beside may enter nothing", "hang._is_proven", "inspection.others_act", "False"),
    Mutation("what a script has read is not heeded", "checkpoint_trust.fold_checkpoint_read", "if news.save == given:", "if True:"),
    Mutation("what was told of a suspect is told again", "suspects.decide", "noticed.at >= since_s or", "False or"),
    Mutation("orch is less patient than torch", "stall_timeout.timeout_s", "return collectives.torch_limit_s(waiting)", "return 60.0"),
    Mutation("a restart that is asked for costs budget", "facts.AttemptFacts.costs_no_restart", "self.restart_requested", "False"),
    Mutation("a restart that is asked for is none", "brain._check_attempt_end", "if attempt.restart_requested:", "if False:"),
    Mutation("a restart that is asked for ends the job", "restart_policy._decide_restart", "if verdict is None and attempt.restart_requested:", "if False:"),
    Mutation("a hang is said again and again", "brain._judge_hang", "if attempt.active_notice(d.NoticeTopic.HANG) is None:", "if (active := attempt.active_notice(d.NoticeTopic.HANG)) is None or deadlines.now_s > active.at + 5.0:"),
    Mutation("what was said of a hang stands for ever", "brain._withdraw_hang", "if active is None or", "if True or"),
    Mutation("ranks out of step are not seen", "desync.find_difference", "agreed < AGREED_MIN", "True"),
    Mutation("the odd one is taken for the one in step", "desync._find_outliers", "if counts[rank] != most", "if counts[rank] == most"),
    Mutation("a group whose counts never agreed is judged", "desync.find_difference", "agreed < AGREED_MIN or ", "agreed < 1 or "),
    Mutation("a difference that passes is a desync", "desync.find_difference", "and not lasts", "and False"),
    Mutation("all optimizers are one", "desync.record_counts", "tally = tallies[mark.optimizer_step]", "tally = tallies.setdefault(mark.step, Tally(mark.step))"),
    Mutation("what ranks send to single others is a desync", "desync.find_difference", "if series.key in facts.uncountable_groups:", "if False:"),
    Mutation("a desync is said again and again", "desync.decide", "or attempt.last_notice(d.NoticeTopic.DESYNC)", ""),
    Mutation("no look says where a desync began", "desync._changes", "if rank.inspection is None:", "if True:"),
    Mutation("a desync waits for looks without end", "inspections.ANSWER_S_MAX", "", "1e9"),
    Mutation("a new supervisor compares with what it has not seen", "fold_events._supervisor_started", "desync.forget_counts(facts)", "pass"),
    Mutation("a desync is tried again", "desync._verdict", "retry=False", "retry=True"),
    Mutation("a job that is done is out of step no more", "brain._check_attempt_end", "desync.decide(facts, attempt, deadlines) or [finish]", "[finish]"),
    Mutation("preemption costs budget", "facts.AttemptFacts.costs_no_restart", "self.is_preempted or ", ""),
    Mutation("the end of an allocation is overheard", "allocation.fold_allocation_ending", "facts.allocation_ending = news", "pass"),
    Mutation("what was said of an old allocation counts", "allocation.fold_allocation_began", "facts.allocation_ending = facts.requeued_at = facts.allocation_end = None", "facts.requeued_at = facts.allocation_end = None"),
    Mutation("a job does not rest in the queue", "fold_decisions._requeue", "facts.requeued_at, facts.requeue_reason = news.at, news.why", "facts.requeue_reason = news.why"),
    Mutation("a job rests for ever", "allocation.fold_allocation_began", "facts.allocation_ending = facts.requeued_at = facts.allocation_end = None", "facts.allocation_ending = facts.allocation_end = None"),
    Mutation("a job stays in what ends", "allocation.leave_reason", "if facts.allocation_ending is not None:", "if False:"),
    Mutation("a job stays where too few nodes can be used", "allocation.leave_reason", "attempt.verdict.signature.cause is FailureCause.PLACEMENT", "False"),
    Mutation("a job that has come back leaves again", "allocation.leave_reason", "if attempt.allocation_lost_at is not None:", "if False:"),
    Mutation("the end of a later allocation is overheard", "allocation.leave_reason", "if facts.allocation_ending is not None:", "if facts.allocation_ending is not None and attempt.allocation_lost_at is None:"),
    Mutation("too few nodes end the job", "placement._verdict", "facts.queue is not None", "False"),
    Mutation("too few nodes twice are no progress", "repeated_failure.mark_repeated", " and verdict.signature.cause is not FailureCause.PLACEMENT", ""),
    Mutation("the time limit always leads back", "allocation.verdict", "may_continue = facts.queue.requeues_at_time_limit or", "may_continue = True or"),
    Mutation("a lost first node is not noticed", "allocation.fold_allocation_began", "attempt.allocation_loss = ", "_ = "),
    Mutation("a new allocation proves that the old one is clear", "allocation.fold_allocation_began", "attempt.allocation_lost_at = news.at", "attempt.allocation_lost_at = news.at\n        for node in facts.every_node():\n            node.cleared_attempt = attempt.number"),
    Mutation("a lost allocation is no break", "allocation.fold_allocation_began", "attempt.allocation_lost_at = news.at", "pass"),
    Mutation("agents of the old allocation are taken for the new one's", "allocation.fold_allocation_began", "node.agent_state, node.incarnation = AgentState.ABSENT", "node.agent_state, node.incarnation = node.agent_state"),
    Mutation("agents are launched on nodes that are not ours", "brain._stop_orders", "(allocated_nodes is None or node.name in allocated_nodes) and ", ""),
    Mutation("old nodes are forgotten at once", "allocation.fold_planned", "if name not in names_planned\n", "if False\n"),
    Mutation("TERM is a crash at once", "allocation.TERM_S", "", "0.0"),
    Mutation("nobody is waited for before a requeue", "allocation.may_leave_unclear", "if not any(", "if True or not any("),
    Mutation("a requeue waits for ever", "allocation.may_leave_unclear", "return deadlines.passed(by_s if latest_s is None else min(by_s, latest_s))", "return False"),
    Mutation("a requeue waits past the time limit", "allocation.may_leave_unclear", "if latest_s is None else min(by_s, latest_s)", ""),
    Mutation("grace past the time limit", "allocation.grace_s", "min(user_grace_s, max(grace_s_min, by_s - (attempt.stop_at or 0.0)))", "user_grace_s"),
    Mutation("ranks are not told to save themselves", "allocation.may_save_first", "attempt.is_preempted", "False"),
    Mutation("a lost gang is told to save itself", "allocation.may_save_first", " and attempt.allocation_lost_at is None", ""),
    Mutation("the grace is that of any stop", "allocation.grace_s", "facts.queue.grace_s if attempt.is_preempted else plain_s", "plain_s"),
    Mutation("a lost node without a spare costs two restarts", "restart_policy.decide_next", "not leave and allocation.is_short(facts, attempt)", "False"),
    Mutation("a cancel from outside is a failure", "allocation._note_cancelled", "facts.goal = JobGoal.CANCEL", "pass"),
    Mutation("the end of an allocation is not the job's", "allocation.fold_allocation_ended", "facts.allocation_end = news", "pass"),
    Mutation("a stale word ends the job", "allocation.fold_allocation_ended", " or any(node.agent_state is AgentState.UP for node in facts.nodes.values())", ""),
    Mutation("a word on an older allocation ends the job", "allocation.fold_allocation_ended", " or is_past", ""),
    Mutation("grace is cut where the queue puts the job back", "allocation._leave_by_s", "0.0 if facts.allocation_ending.cause is AllocationEndCause.REQUEUED else REQUEUE_S", "REQUEUE_S"),
    Mutation("stays without progress go on for ever", "allocation.FRUITLESS_ALLOCATIONS_MAX", "", "1000"),
    Mutation("no node is avoided", "allocation.nodes_to_avoid", "if reason := node.excluded or gone:", "if False:"),
    Mutation("good nodes are avoided", "allocation.nodes_to_avoid", "if reason := node.excluded or gone:", 'if reason := node.excluded or gone or Fault(node.name, "it was ours"):'),
    Mutation("whom nobody reaches in a queue is tried again", "fold_decisions._note_missing", "may_run_elsewhere = has_other_hosts or facts.queue is not None", "may_run_elsewhere = has_other_hosts"),
    Mutation("resume from where the attempt began", "brain._begin", "attempt.number + 1, facts.checkpoint", "attempt.number + 1, attempt.resume"),
    Mutation("an attempt begins without comparing", "brain._decide_after_stop", "_compare(facts, attempt, deadlines) or ", ""),
    Mutation("an attempt begins while a save is compared", "brain._begin", "if attempt.compare_ordered_at is not None:", "if False:"),
    Mutation("what was compared before a supervisor died is proved", "fold_events._supervisor_started", "facts.attempt.compare_ordered_at = facts.attempt.compared_checkpoint = None", "facts.attempt.compare_ordered_at = None"),
    Mutation("a comparison is waited for that died with its supervisor", "fold_events._supervisor_started", "facts.attempt.compare_ordered_at = facts.attempt.compared_checkpoint = None", "facts.attempt.compared_checkpoint = None"),
    Mutation("a save that differs is begun from", "fold_events._checkpoint_compared", "(news.save if not news.fault else -1)", "facts.checkpoint_choice.checkpoint.number if facts.checkpoint_choice.checkpoint else 0"),
    Mutation("bytes are not compared where they may have suffered", "checkpoint_trust.needs_deep_compare", "return is_lost or", "return False and"),
    Mutation("a gone save is chosen", "resume_choice._unfit_reason", "if checkpoint.state is not CheckpointState.WHOLE:", "if checkpoint.state not in (CheckpointState.WHOLE, CheckpointState.GONE):"),
    Mutation("a torn save is chosen", "resume_choice._unfit_reason", "if checkpoint.state is not CheckpointState.WHOLE:", "if checkpoint.state not in (CheckpointState.WHOLE, CheckpointState.TORN):"),
    Mutation("a save counts before it is closed, or home", "resume_choice._unfit_reason", "if checkpoint.state is not CheckpointState.WHOLE:", "if checkpoint.state not in (CheckpointState.WHOLE, CheckpointState.OPEN):"),
    Mutation("the oldest save is the newest", "resume_choice.choose_checkpoint", "reverse=True", "reverse=False"),
    Mutation("what an earlier attempt saved further on is forgotten", "resume_choice.choose_checkpoint", "elif is_last and not is_named and _got_further(save, best):", "elif False:"),
    Mutation("any save fits any number of ranks", "resume_choice.fits_world_size", "return checkpoint.fits_any_size or", "return True or"),
    Mutation("saves that were passed over are not named", "brain._begin", "passed_over = facts.checkpoint_choice.skipped", "passed_over = ()"),
    Mutation("the save that a person has named is ignored", "fold_events._resume_requested", "facts.resume_overrides += (ResumeOverride(news.save, facts.resumed_after),) if news.save else ()", "pass"),
    Mutation("a pin outlives a resume", "fold_decisions._end_job", "facts.resume_overrides = facts.resume_overrides[:-1]", "break"),
    Mutation("what a person has left behind is resumed from", "resume_choice.ResumeOverride.is_superseded_by", "checkpoint is not None and checkpoint.attempt > self.attempt", "False"),
    Mutation("a pin outlives what later attempts write", "resume_choice.ResumeOverride.allows", " or checkpoint.attempt > self.attempt", ""),
    Mutation("a named save is the newest if it has more steps", "resume_choice.choose_checkpoint", "not is_named and _got_further", "_got_further"),
    Mutation("where a named save is gone the job begins anew", "checkpoint_trust.no_attempt_reason", "if facts.resume_override is not None and choice.checkpoint is None and choice.world_size_mismatch is None:", "if False:"),
    Mutation("a save that cannot be loaded is never given up", "brain._decide_after_stop", "if unloadable_checkpoint is not None:", "if False:"),
    Mutation("what a rank says of its save is not heard", "checkpoint_trust.find_unloadable", "and is_bad and", "and False and"),
    Mutation("what a node says of its save is not heard", "checkpoint_trust.find_unloadable", "node.setup_failure.save == checkpoint.number", "False"),
    Mutation("ending alike before a step proves nothing", "checkpoint_trust.find_unloadable", "return UnloadableCheckpoint(checkpoint, why, is_certain=False)", "return None"),
    Mutation("a save is given up at the first failure", "checkpoint_trust.find_unloadable", "last.verdict.signature != verdict.signature", "False"),
    Mutation("a save from which steps were made is given up", "checkpoint_trust.find_unloadable", "or facts.steps_made", ""),
    Mutation("the only save is given up", "checkpoint_trust.find_unloadable", " or not _has_another(facts, checkpoint)", ""),
    Mutation("a named save is given up for an older one", "checkpoint_trust._has_another", ", facts.resume_override", ""),
    Mutation("a failure that nothing follows gives a save up", "checkpoint_trust.find_unloadable", " and verdict.retry", ""),
    Mutation("what loads two saves alike is never to blame", "repeated_failure._fails_loading_any", "return is_alike and", "return False and"),
    Mutation("a save that was given up is begun from", "fold_decisions._distrust_checkpoint", "checkpoint_trust.set_state(facts, news.save, CheckpointState.DISTRUSTED, news.why)", "pass"),
    Mutation("what was given up is never trusted again", "fold_decisions._end_job", "checkpoint_trust.restore_trust(facts)", "pass"),
    Mutation("what could not be loaded is never trusted again", "fold_decisions._distrust_checkpoint", "(*facts.distrusted_checkpoints, news.save)", "facts.distrusted_checkpoints if news.is_certain else (*facts.distrusted_checkpoints, news.save)"),
    Mutation("what was given up is not trusted again after a cancel", "fold_decisions._end_job", "is not d.JobEnd.SUCCEEDED", "is d.JobEnd.FAILED"),
    Mutation("what was given up is trusted again though an older save was the better", "fold_decisions.archive_attempt", "facts.distrusted_checkpoints = ()", "pass"),
    Mutation("what was given up is trusted again though its attempt got further", "fold_decisions._end_job", " and not facts.has_progressed()", ""),
    Mutation("two saves of one step are one", "repeated_failure._is_same_point", "if from_others and", "if False and"),
    Mutation("a save that is gone is progress", "checkpoint_trust._note_progress", "and checkpoint.state is CheckpointState.WHOLE", ""),
    Mutation("what a script saves that began anew is progress", "facts.Facts.has_progressed", "attempt.wrote_newer_checkpoint and attempt.actual_resume is None", "attempt.wrote_newer_checkpoint"),
    Mutation("where a script began is not noted", "checkpoint_trust.fold_resumed_elsewhere", "attempt.actual_resume = ActualResume(news.step, news.main, news.steps)", "pass"),
    Mutation("a script is always believed to begin from its save", "steps.find_true_start", "if truth is None or", "if True or"),
    Mutation("a script that overwrites one name is suspected", "steps.find_true_start", "and checkpoint.key != checkpoint.series", ""),
    Mutation("steps of saves forget where their attempt began", "steps.job_step", "counted = base_step + checkpoint.steps", "counted = checkpoint.steps"),
    Mutation("any number in a name is its step", "steps.job_step", " if abs(number - counted) <= NEAR_STEPS", ""),
    Mutation("what saves state is ignored", "steps.job_step", "if checkpoint.stated is not None and not misstated:", "if False:"),
    Mutation("what was written out of step is used", "fold_decisions._judge", "checkpoint_trust.fold_judged(facts, attempt)", "pass"),
    Mutation("what was written out of step is used if it comes late", "checkpoint_trust.fold_checkpoint_changed", "_distrust_unsound(facts, attempt)", "pass"),
    Mutation("all that an attempt wrote out of step saved is given up", "checkpoint_trust._distrust_unsound", "if checkpoint.step > sound - (", "if True or ("),
    Mutation("a script that goes on is not waited for", "facts.Facts.is_done", "self.are_ranks_done and not any(map(self.runs_script, self.gang))", "self.are_ranks_done"),
    Mutation("a call begins before all nodes have come", "launch_calls.next_call", "node.launcher_call < number or", "False or"),
    Mutation("steps of earlier calls are forgotten", "fold_decisions._next_call", "attempt.earlier_steps = facts.steps_made", "attempt.earlier_steps = 0"),
    Mutation("a script that failed is done", "launch_calls.verdict", "node.script_end.code != 0:", "False:"),
    Mutation("nodes at different calls wait for ever", "launch_calls.verdict", "if arrived and ended:", "if False:"),
    Mutation("a script is not stopped before its ranks start", "fold_decisions._to", "facts.runs_launch_script", "False"),
    Mutation("a sick GPU costs budget", "facts.AttemptFacts.costs_no_restart", "self.leaves_host or ", ""),
    Mutation("a host with a sick GPU is used again", "fold_decisions._note_missing", "elif attempt.leaves_host and", "elif False and"),
    Mutation("an innocent host is left", "host_faults.cite", "facts.nodes.get(verdict.node)", "next((one for one in facts.nodes.values() if one.gpus), None)"),
    Mutation("a sick GPU is no matter", "host_faults.leaves_host", "return bool(verdict.host_fault) and", "return False and"),
    Mutation("a sick GPU that is seen late is no matter", "host_faults.fold_gpus", "attempt.verdict.node == node.name and", "False and"),
    Mutation("a host with a sick GPU is never used again", "host_faults.readmit", ">= facts.pool.nodes", ">= 0"),
    Mutation("any host can take over", "host_faults.leaves_host", "and placement.has_substitute(facts)", ""),
)  # fmt: skip

KILLERS = {
    "no fence wait": "named queue-a-whole-gang-trains-on-beside-its-job",
    "fence wait too short": "random 32",
    "longer times of agents are not waited for": "named pool-partitioned-after-a-long-pause",
    "time alone is not waited for": "named pool-partitioned-after-long-work-without-steps",
    "what an agent was told ends with its line": "named pool-partitioned-after-a-long-pause",
    "fence wait without proof of a break": "named one-node-cut-off-trains-on",
    "a silent node is over before its agent's time is": "named pool-partitioned-while-others-stand-still",
    "nobody need see that the gang stands still": "named all-lines-cut-while-the-gang-goes-on",
    "an agent without a line for long has no longer time": "named pool-partitioned-after-long-without-a-line",
    "what came before the supervisor is no matter": "named pool-partitioned-while-the-supervisor-was-away",
    "an absent agent is taken for a clear node": "named one-node-cut-off-trains-on",
    "a connected node is taken for clear": "clean 0",
    "budget off by one": "named host-gone-for-good",
    "restart.max 0 restarts after progress": "random 135",
    "progress costs nothing ever": "named host-gone-for-good",
    "every step counts as progress": "random 34",
    "retry is ignored": "random 1",
    "a cancel is forgotten at the end": "random 2",
    "a resume keeps the spent budget": "named checkpoints-of-which-none-can-be-loaded",
    "orders are not void when a line breaks": "random 168",
    "stops are forgotten after a reconnect": "random 168",
    "a start before all are ready": "clean 0",
    "ranks meet at the last node": "clean 0",
    "who has left early is not named": "clean 24",
    "a victim is taken for the culprit": "clean 6",
    "a silent node is no suspect": "clean 7",
    "no grace after a supervisor's death": "clean 16",
    "progress does not speak for a silent node": "clean 59",
    "log lines speak for a silent node": "named one-node-cut-off-trains-on",
    "silence is for ever": "named one-node-cut-off-trains-on",
    "a new agent hides its dead ranks": "clean 6",
    "an agent that sets a script up has nothing that may begin": "random 11550",
    "a gone agent hides its dead ranks": "clean 7",
    "fenced ranks count as done": "random 2",
    "one done rank is the whole job": "clean 0",
    "why is empty": "clean 0",
    "a start has no deadline": "random 39",
    "a start never takes too long": "named host-gone-for-good",
    "hangs are not seen": "desync 7",
    "a late answer is none": "hang 77",
    "a stopped rank is not seen": "hang 37",
    "a short pause is a hang": "clean 4",
    "no back-off deadline": "named checkpoint-that-cannot-be-loaded-and-no-library-says-so",
    "no time limit": "clean 19",
    "the same failure is never recognised": "named script-ignores-its-checkpoint",
    "unreachable nodes are waited for without end": "random 106",
    "a launch that is not heard of is not repeated": "clean 8",
    "a fatal signal before any step is never recognised": "named fatal-signal-again-before-any-step",
    "who handles an exception is not told from who waits for it": "named hang-behind-an-exception",
    "stacks are taken again and again": "named hang-with-stacks",
    "the facts hold a wish": "named a-quiet-night",
    "a folded beat is stamped anew": "hang 24",
    "beats that were written down never reach the journal": "desync 5",
    "a host that hangs is never told from its script": "named pool-a-hang-that-goes-along-to-another-host",
    "coming equally far is never recognised": "named script-ignores-the-one-checkpoint-that-it-overwrites",
    "one rank that is alone speaks for all": "named ranks-of-which-one-is-in-company",
    "ranks are alone from the first step on": "named ranks-that-are-alone",
    "ranks that are alone are not named": "named ranks-that-are-alone",
    "that ranks are alone is not taken back": "named ranks-that-are-alone-for-a-while",
    "a loss that stays infinite is let be": "named a-loss-that-stays-infinite-fails",
    "what was saved after the last finite loss is begun from": "named a-loss-that-is-infinite-twice-fails",
    "the same divergence is rolled back again": "named a-loss-that-is-infinite-twice-fails",
    "a loss that is not finite is not named": "named ranks-whose-loss-is-infinite",
    "that a loss is not finite is never taken back": "named ranks-whose-loss-is-infinite-for-a-while",
    "a rank that drifts is not named": "named a-rank-that-drifts",
    "only the last step of a heartbeat is compared": "named a-rank-that-drifts-within-a-heartbeat",
    "ranks are said to hold nothing in common before all have told": "named replicas-on-hosts-of-their-own",
    "ranks are replicas after one step": "named a-rank-that-differs-early",
    "that no two ranks hold the same is not said": "named ranks-that-hold-shards",
    "a node without room in memory is not named": "named a-node-without-room-in-memory",
    "that a node has no room in memory is said again": "named a-node-without-room-in-memory",
    "ranks that end well behind a traceback are not named": "named ranks-of-which-one-ends-well-behind-a-traceback",
    "busy hosts are not asked again": "pool 22",
    "busy hosts are asked one by one": "pool 27",
    "busy hosts are asked as often after hours": "pool 28",
    "hosts are held while others are busy": "pool 21",
    "jobs that came first are no matter": "named pool-behind-other-jobs",
    "a host that boots is given up for good": "pool 86",
    "an excluded host is launched again": "named pool-two-keys-are-wrong",
    "an excluded host is kept beside the gang": "random 35",
    "a dismissed host is used": "pool 67",
    "ranks move about": "named pool-checkpoint-on-its-way-from-a-lost-host",
    "hosts are taken as they come up": "pool 6",
    "there are no spares": "pool 6",
    "spares are launched when a line breaks": "pool 10",
    "a lost host is relied upon": "pool 124",
    "a host that was launched in vain is hoped for": "pool 21",
    "spares are not made ready": "pool 6",
    "setup lines run on spares beside ranks": "random 251",
    "a spare that cannot be made ready is kept": "random 116",
    "surplus hosts are kept": "pool 7",
    "a lost host is waited for without end": "pool 2",
    "a lost host is not waited for": "named pool-lost-and-no-other-host",
    "other hosts are not thought of": "hosts 229",
    "hosts that have not answered are no matter": "named pool-all-keys-are-wrong",
    "too few hosts are waited for without end": "pool 15",
    "a slow host is relied on": "pool 84",
    "launches in vain are never forgotten": "pool 9",
    "waiting for hosts is starting": "pool 24",
    "the end of waiting is the beginning of time": "pool 21",
    "waiting for hosts is running": "pool 22",
    "ranks meet where some can come": "pool 31",
    "ranks meet over any interface": "named pool-a-spare-takes-over",
    "ranks start before all have probed": "named pool-a-spare-takes-over",
    "who cannot meet is tried again": "named pool-a-node-cannot-reach-the-first",
    "the first node is never the one apart": "pool 33",
    "who accused the one apart is not forgiven": "pool 34",
    "a host that is never ready is tried again": "pool 85",
    "an unfit host is tried again": "pool 17",
    "a host whose copy of a save is bad is done without": "random 1024",
    "no checkpoint on its way is waited for": "named pool-checkpoint-on-its-way-at-a-crash",
    "checkpoints on their way are waited for without end": "pool 39",
    "a lost host's checkpoint is waited for": "pool 40",
    "one look is enough": "named hang-with-stacks",
    "ranks are looked at once": "desync 7",
    "no rank is let be": "hang 24",
    "patience is for ever": "desync 7",
    "log lines hide a hang": "hang 1",
    "log lines hide a hang before the first step": "hang 1",
    "a start is looked at when nothing is heard": "hang 36",
    "no silence is suspicious": "hang 0",
    "the usual time of a step is no matter": "hang 4",
    "the usual time of a backward pass is no matter": "named hang-of-ranks-that-make-passes-and-no-steps",
    "backward passes do not speak for a gang": "named hang-of-ranks-that-make-passes-and-no-steps",
    "whoever computes on its own hangs": "hang 31",
    "a rank that serves hangs": "hang 28",
    "who has not entered a collective is not missed": "hang 5",
    "who shows no stack has not come": "hang 34",
    "who shows no stack is waited for without end": "hang 35",
    "who waits in an earlier collective is missed": "hang 23",
    "different collectives are taken for the same": "hang 4",
    "the odd one is taken for the right one": "hang 4",
    "a cut between ranks is a hang at once": "hang 22",
    "a thread beside may enter nothing": "hang 18",
    "what a script has read is not heeded": "named script-reads-no-checkpoint",
    "what was told of a suspect is told again": "hang 2",
    "orch is less patient than torch": "named no-hang-within-the-time-that-torch-gives",
    "a restart that is asked for costs budget": "named restart-asked-for",
    "a restart that is asked for is none": "named restart-asked-for",
    "a restart that is asked for ends the job": "named restart-asked-for",
    "a hang is said again and again": "desync 7",
    "what was said of a hang stands for ever": "desync 7",
    "ranks out of step are not seen": "desync 0",
    "the odd one is taken for the one in step": "desync 0",
    "a group whose counts never agreed is judged": "desync 14",
    "a difference that passes is a desync": "named desync-and-resumed-from-before",
    "all optimizers are one": "desync 17",
    "what ranks send to single others is a desync": "desync 19",
    "a desync is said again and again": "named desync-noticed",
    "no look says where a desync began": "desync 2",
    "a desync waits for looks without end": "desync 6",
    "a new supervisor compares with what it has not seen": "desync 16",
    "a desync is tried again": "desync 0",
    "a job that is done is out of step no more": "desync 806",
    "preemption costs budget": "queue 1",
    "the end of an allocation is overheard": "queue 0",
    "what was said of an old allocation counts": "queue 0",
    "a job does not rest in the queue": "queue 0",
    "a job rests for ever": "queue 0",
    "a job stays in what ends": "queue 0",
    "a job stays where too few nodes can be used": "queue 31",
    "a job that has come back leaves again": "named queue-too-few-nodes-can-be-used",
    "the end of a later allocation is overheard": "random 2466",
    "too few nodes end the job": "queue 31",
    "too few nodes twice are no progress": "queue 33",
    "the time limit always leads back": "queue 10",
    "a lost first node is not noticed": "queue 6",
    "a new allocation proves that the old one is clear": "queue 23",
    "a lost allocation is no break": "named queue-a-whole-gang-trains-on-beside-its-job",
    "agents of the old allocation are taken for the new one's": "queue 12",
    "agents are launched on nodes that are not ours": "queue 23",
    "old nodes are forgotten at once": "queue 23",
    "TERM is a crash at once": "queue 3",
    "nobody is waited for before a requeue": "queue 0",
    "a requeue waits for ever": "queue 12",
    "a requeue waits past the time limit": "queue 12",
    "grace past the time limit": "queue 5",
    "ranks are not told to save themselves": "queue 0",
    "a lost gang is told to save itself": "queue 29",
    "the grace is that of any stop": "queue 0",
    "a lost node without a spare costs two restarts": "queue 26",
    "a cancel from outside is a failure": "queue 15",
    "the end of an allocation is not the job's": "queue 13",
    "a stale word ends the job": "queue 7",
    "a word on an older allocation ends the job": "named queue-an-older-allocation-is-said-to-be-over",
    "grace is cut where the queue puts the job back": "named queue-requeued-from-outside-while-ranks-hang",
    "stays without progress go on for ever": "queue 14",
    "no node is avoided": "queue 26",
    "good nodes are avoided": "queue 0",
    "whom nobody reaches in a queue is tried again": "queue 34",
    "resume from where the attempt began": "named checkpoint-damaged-between-attempts",
    "an attempt begins without comparing": "named checkpoint-damaged-between-attempts",
    "an attempt begins while a save is compared": "named crash-with-victims",
    "what was compared before a supervisor died is proved": "named supervisor-killed-once-a-checkpoint-was-compared",
    "a comparison is waited for that died with its supervisor": "named supervisor-killed-while-a-checkpoint-is-compared",
    "a save that differs is begun from": "named checkpoint-damaged-between-attempts",
    "bytes are not compared where they may have suffered": "named desync-and-resumed-from-before",
    "a gone save is chosen": "named checkpoint-damaged-between-attempts",
    "a torn save is chosen": "named checkpoint-cut-off-by-a-kill",
    "a save counts before it is closed, or home": "named pool-checkpoint-on-its-way-from-a-lost-host",
    "the oldest save is the newest": "named hang-after-the-last-word",
    "what an earlier attempt saved further on is forgotten": "random 1582",
    "any save fits any number of ranks": "named checkpoint-of-other-ranks",
    "saves that were passed over are not named": "named checkpoint-damaged-between-attempts",
    "the save that a person has named is ignored": "named resume-from-a-named-checkpoint",
    "a pin outlives a resume": "named resume-from-a-named-checkpoint-that-is-damaged",
    "what a person has left behind is resumed from": "named resume-after-a-resume-from-a-named-checkpoint",
    "a pin outlives what later attempts write": "named resume-from-a-named-checkpoint",
    "a named save is the newest if it has more steps": "named resume-from-a-named-checkpoint-that-the-script-ignores",
    "where a named save is gone the job begins anew": "named resume-from-a-named-checkpoint-that-is-damaged",
    "a save that cannot be loaded is never given up": "named checkpoint-that-cannot-be-loaded",
    "what a rank says of its save is not heard": "named checkpoint-that-cannot-be-loaded",
    "what a node says of its save is not heard": "named checkpoint-that-is-not-whole-on-a-node",
    "ending alike before a step proves nothing": "named checkpoint-that-cannot-be-loaded-and-no-library-says-so",
    "a save is given up at the first failure": "random 238",
    "a save from which steps were made is given up": "random 104",
    "the only save is given up": "named checkpoints-of-which-none-can-be-loaded",
    "a named save is given up for an older one": "named resume-from-a-named-checkpoint-that-cannot-be-loaded",
    "a failure that nothing follows gives a save up": "random 450",
    "what loads two saves alike is never to blame": "named checkpoints-that-the-code-cannot-load",
    "a save that was given up is begun from": "named checkpoint-that-cannot-be-loaded",
    "what was given up is never trusted again": "named checkpoints-of-which-none-can-be-loaded",
    "what could not be loaded is never trusted again": "named checkpoint-that-cannot-be-loaded-and-is-tried-again-after-a-cancel",
    "what was given up is not trusted again after a cancel": "named checkpoint-that-cannot-be-loaded-and-is-tried-again-after-a-cancel",
    "what was given up is trusted again though an older save was the better": "named checkpoint-that-cannot-be-loaded-and-is-tried-again-after-a-cancel",
    "what was given up is trusted again though its attempt got further": "named checkpoint-that-cannot-be-loaded-and-is-tried-again-after-a-cancel",
    "two saves of one step are one": "named checkpoints-of-one-step-that-cannot-be-loaded",
    "a save that is gone is progress": "random 1519",
    "what a script saves that began anew is progress": "random 121",
    "where a script began is not noted": "named resume-from-a-named-checkpoint-that-the-script-ignores",
    "a script is always believed to begin from its save": "named resume-from-a-named-checkpoint-that-the-script-ignores",
    "a script that overwrites one name is suspected": "random 475",
    "steps of saves forget where their attempt began": "random 324",
    "any number in a name is its step": "random 239",
    "what saves state is ignored": "named checkpoints-that-state-their-step",
    "what was written out of step is used": "desync 0",
    "what was written out of step is used if it comes late": "desync 5",
    "all that an attempt wrote out of step saved is given up": "named desync-and-resumed-from-before",
    "a script that goes on is not waited for": "random 0",
    "a call begins before all nodes have come": "random 0",
    "steps of earlier calls are forgotten": "random 9",
    "a script that failed is done": "random 582",
    "nodes at different calls wait for ever": "random 125",
    "a script is not stopped before its ranks start": "random 71",
    "a sick GPU costs budget": "named pool-a-sick-gpu-and-a-spare",
    "a host with a sick GPU is used again": "named pool-a-sick-gpu-and-a-spare",
    "an innocent host is left": "pool 91",
    "a sick GPU is no matter": "pool 87",
    "a sick GPU that is seen late is no matter": "pool 88",
    "a host with a sick GPU is never used again": "pool 93",
    "any host can take over": "named pool-a-sick-gpu-and-no-other-host",
}
"""The night that notices each mutation."""


_MODULES = {
    found.name.rpartition(".")[2]: found.name
    for package in (checkpoints, brain)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
}
"""The modules of both by their last names, which differ."""


@contextlib.contextmanager
def mutated(mutation: Mutation, modules: Mapping[str, str] = _MODULES) -> Iterator[None]:
    """Run the block with the mutation in place. `modules`: by the names that mutations give them. Raises AssertionError when the code
    has moved on from it."""
    module_name, _, path = mutation.where.partition(".")
    module = importlib.import_module(modules[module_name])
    if not mutation.old:
        plain = getattr(module, path)
        setattr(module, path, type(plain)(mutation.new))
        try:
            yield
        finally:
            setattr(module, path, plain)
        return
    function = _function(module, path)
    code = function.__code__
    function.__code__ = _mutant(function, mutation).__code__
    try:
        yield
    finally:
        function.__code__ = code


def _function(module: Any, path: str) -> FunctionType:
    found = module
    for name in path.split("."):
        found = vars(found)[name]
    found = found.fget if isinstance(found, property) else found
    assert isinstance(found, FunctionType), path
    return found


def _mutant(function: FunctionType, mutation: Mutation) -> FunctionType:
    source = textwrap.dedent(inspect.getsource(function)).removeprefix("@property\n")
    assert mutation.old in source, f"{mutation.name}: {mutation.where} has no {mutation.old!r} any more"
    scope: dict[str, Any] = {}
    exec(
        compile(source.replace(mutation.old, mutation.new, 1), mutation.where, "exec"),
        function.__globals__,
        scope,
    )
    mutant = scope[function.__name__]
    assert isinstance(mutant, FunctionType)
    return mutant


_CASES: dict[str, tuple[Callable[[int], tuple[Night, Any]], Callable[[World, Any], None]]] = {
    "clean": (clean_night, check_clean), "hang": (hang_night, check_clean), "desync": (desync_night, check_desync),
    "pool": (pool_night, check_pool), "queue": (queue_night, check_queue),
}  # fmt: skip
"""Nights with one thing wrong, each with the check of what is to come of it."""


def kills(night: str, mutation: Mutation) -> bool:
    """Tell whether a night, `random N`, `hosts N`, `clean N`, `hang N`, `desync N`, `pool N`, `queue N` or `named NAME`, notices the mutation."""
    kind, _, seed = night.partition(" ")
    with mutated(mutation):
        try:
            if kind in _CASES:
                made, check = _CASES[kind]
                lived, expected = made(int(seed))
                world = World(lived)
                world.play(EVENTS_MAX)
                check(world, expected)
            elif kind == "named":
                World(NAMED[seed]).play(EVENTS_MAX)
            else:
                World(random_night(int(seed), queues=kind == "random")).play(EVENTS_MAX)
        except (Violation, AssertionError, KeyError, StopIteration):
            return True
    return False


def search(mutation: Mutation) -> str:
    """Return the first night that kills the mutation, or nothing."""
    nights = [f"named {name}" for name in NAMED] + [f"pool {seed}" for seed in range(2 * POOL_CASES + 3)]
    nights += [f"queue {seed}" for seed in range(2 * QUEUE_CASES)]
    nights = [f"hang {seed}" for seed in range(2 * HANG_CASES)] + nights
    nights = [f"desync {seed}" for seed in range(2 * DESYNC_CASES)] + nights
    for night in nights:
        if kills(night, mutation):
            return night
    for seed in range(SEARCH_MAX):
        for night in (f"clean {seed}", f"random {seed}"):
            if (seed < 115 or night.startswith("random")) and kills(night, mutation):
                return night
    return ""


def main() -> None:
    for mutation in MUTATIONS:
        if sys.argv[1:] and not any(word in mutation.name for word in sys.argv[1:]):
            continue
        print(f'    "{mutation.name}": "{search(mutation)}",', flush=True)


if __name__ == "__main__":
    main()
