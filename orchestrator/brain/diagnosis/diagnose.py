"""Order in which an attempt is checked for failures, and three short checks: time limit, launch, slow start.

What is certain (a dead process, a failed setup) comes before what is inferred from silence. Each other kind of failure
has a file of its own: `crash`, `node_lost`, `hang`; `desync` and `stragglers` are called by `brain` itself; failures
of a queue, a pool or a rendezvous are judged in `scheduling`.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.brain.diagnosis import crash, divergence, hang, node_lost
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Evidence, EvidenceKind, FailureCause, Verdict, VerdictKind
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState, NodeFacts
from orchestrator.brain.scheduling import allocation, host_faults, launch_calls, placement, rendezvous
from orchestrator.brain.scheduling.repeated_failure import mark_repeated
from orchestrator.core.text import what_and_fix


def diagnose(facts: Facts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict that the facts call for now, or None; deadlines still ahead are left in `deadlines`."""
    attempt = facts.attempt
    if attempt is None or attempt.phase is Phase.STOP:
        return None
    checks: tuple[Callable[[Facts, AttemptFacts, Deadlines], Verdict | None], ...] = (
        allocation.verdict,
        _time_limit_verdict,
        _launch_verdict,
        placement.verdict,
        placement.queue_timeout_verdict,
        rendezvous.verdict,
        crash.judge,
        launch_calls.verdict,
        node_lost.judge,
        _start_timeout_verdict,
        divergence.judge,
        hang.judge,
    )
    for question in checks:
        judged = question(facts, attempt, deadlines)
        if judged is not None:
            judged = host_faults.cite(facts, judged)
            return judged if host_faults.leaves_host(facts, judged) else mark_repeated(facts, attempt, judged)
    return None


def _time_limit_verdict(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    limits = facts.limits
    if limits is None or limits.time_limit_s is None or facts.run_began_at is None:
        return None
    if not deadlines.passed(facts.run_began_at + limits.time_limit_s):
        return None
    summary = f"the job's time limit of {limits.time_limit_s:g} s has passed"
    return facts.verdict_on(
        VerdictKind.TIME_LIMIT, summary, retry=False, since_s=facts.run_began_at + limits.time_limit_s
    )


def _launch_verdict(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    for node in facts.gang:
        if node.setup_failure is not None:
            reason, tail = node.setup_failure.reason, node.setup_failure.tail
            retry, fix = not node.setup_failure.is_final, node.setup_failure.fix
            output = (Evidence(tail, EvidenceKind.OUTPUT),) if tail else ()
            return facts.verdict_on(
                VerdictKind.LAUNCH, f"{node.name}: {reason}", node=node.name, proof=(*((Evidence("another attempt would end in the same way", fix=fix),) if fix else ()), *output),
                cause=FailureCause.SETUP, place=(reason,), since_s=node.contact_at, retry=retry,
            )  # fmt: skip
        if node.is_unlaunchable and facts.pool is None and (fault := node.launch_fault):
            head = f"{node.name}: its agent could not be started, {node.launch_failures} times"
            proof = (Evidence(fault.what, fix=fault.fix),)
            return facts.verdict_on(
                VerdictKind.LAUNCH, head, node=node.name, proof=proof, end=f": {what_and_fix(fault)}", retry=False,
                since_s=attempt.began_at,
            )  # fmt: skip
    return None


def _start_timeout_verdict(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    if attempt.running_at is not None or placement.is_queued(facts):
        return None
    assert facts.limits is not None
    since_s = max(attempt.watched_at, attempt.queued_at, attempt.call_at)
    if not deadlines.passed(since_s + facts.limits.start_timeout_s):
        return None
    unstarted = [node for node in facts.gang or facts.nodes.values() if node.started_attempt < attempt.number]
    unstarted.sort(key=lambda node: _is_ready(node, attempt))  # those that are ready wait for the others
    missing = [_stage(node, attempt) for node in unstarted]
    head = f"not all ranks were started within {facts.limits.start_timeout_s:g} s"
    late = [node for node in unstarted if not _is_ready(node, attempt)]
    is_one_of_several = len(late) == 1 < len(facts.gang)
    only_late_node = late[0].name if is_one_of_several and late[0].agent_state is AgentState.UP else ""
    return facts.verdict_on(
        VerdictKind.START_TIMEOUT, head, node=only_late_node, proof=tuple(missing), since_s=attempt.began_at,
        end=f"; {missing[0]}",
    )  # fmt: skip


def _stage(node: NodeFacts, attempt: AttemptFacts) -> Evidence:
    if node.agent_state is AgentState.UP:
        what = "its ranks were not started" if _is_ready(node, attempt) else "its setup has not ended"
        return Evidence(what, EvidenceKind.HOST, node.name)
    fault = node.launch_fault
    what = f"its agent is {node.agent_state.value}{f' ({fault.what})' if fault else ''}"
    return Evidence(what, EvidenceKind.HOST, node.name, fault.fix if fault else "")


def _is_ready(node: NodeFacts, attempt: AttemptFacts) -> bool:
    return node.agent_state is AgentState.UP and node.ready_attempt == attempt.number
