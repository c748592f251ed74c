"""What went wrong, and whose fault is it? Pure: facts and the time in, a verdict with its evidence or nothing out.

The order of the questions matters: what is certain (a dead process, a failed setup) comes before what is inferred
from silence, and a failure that looks like a victim's waits a moment for its culprit.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from orchestrator.brain.diagnosis import hang
from orchestrator.brain.diagnosis.hang_report import node_of
from orchestrator.brain.diagnosis.library_errors import explain
from orchestrator.brain.diagnosis.repeated_failure import recognise
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Kind, Verdict
from orchestrator.brain.model.facts import (
    APART,
    AgentState,
    AttemptFacts,
    Facts,
    NodeFacts,
    Phase,
    RankFacts,
    RankState,
)
from orchestrator.brain.model.verdicts import verdict as _verdict
from orchestrator.brain.scheduling import allocation, fence, placement, rendezvous
from orchestrator.core.text import named

SETTLE_S = 1.0
"""How long a failure that looks like a victim's waits for its culprit. gloo tells peers within a second."""

HOPELESS = ("SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError")
"""Exceptions that another start cannot mend, when they come before the first step."""

_VICTIM = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|error)|remote process exited"
    r"|communicator was aborted|process ?group .*abort|peer|timed out (waiting|after)|recvvalue failed"
    r"|watchdog caught collective",
    re.IGNORECASE,
)
"""What gloo, NCCL and the store say in a rank whose peer has gone."""

_VICTIM_TYPES = re.compile(r"RuntimeError|Dist\w*Error|Connection\w*Error|BrokenPipeError|TimeoutError")
_RENDEZVOUS = re.compile(
    r"address already in use|EADDRINUSE|server socket has failed to listen|client socket has (failed|timed out)"
    r"|Failed to recv, got 0 bytes",
    re.IGNORECASE,
)
_CUDA_OOM = re.compile(r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")


def diagnose(facts: Facts, watch: Deadlines) -> Verdict | None:
    """Return the verdict that the facts call for now, or None; deadlines still ahead are left in `watch`."""
    attempt = facts.attempt
    if attempt is None or attempt.phase is Phase.STOP:
        return None
    questions: tuple[Callable[[Facts, AttemptFacts, Deadlines], Verdict | None], ...] = (
        allocation.verdict,
        _out_of_time,
        _cannot_launch,
        placement.verdict,
        placement.queued_too_long,
        _cannot_meet,
        _crashed,
        _node_lost,
        _start_took_too_long,
        hang.judge,
    )
    for question in questions:
        verdict = question(facts, attempt, watch)
        if verdict is not None:
            return recognise(facts, attempt, verdict)
    return None


def looks_like_victim(rank: RankFacts) -> bool:
    """Tell whether the rank's end is what a rank looks like whose peer has gone."""
    if rank.failure is None or not rank.failure.type:
        return rank.signal == _SIGABRT  # NCCL's watchdog ends a rank whose peers are gone by abort()
    text = f"{rank.failure.type} {rank.failure.message}"
    return bool(_VICTIM_TYPES.search(rank.failure.type) and _VICTIM.search(text))


def _was_ended(rank: RankFacts) -> bool:
    """Tell whether TERM ended the rank, or an exit code says so in the words of a shell."""
    return rank.signal == _SIGTERM or rank.code == 128 + _SIGTERM


_SIGABRT = 6
_SIGKILL = 9
_SIGTERM = 15


def _out_of_time(facts: Facts, attempt: AttemptFacts, watch: Deadlines) -> Verdict | None:
    limits = facts.limits
    if limits is None or limits.time_s_max is None or facts.run_began_at is None:
        return None
    if not watch.passed(facts.run_began_at + limits.time_s_max):
        return None
    summary = f"the job's time limit of {limits.time_s_max:g} s is over"
    return _verdict(
        facts, Kind.TIME_LIMIT, summary, retry=False, since_s=facts.run_began_at + limits.time_s_max
    )


def _cannot_launch(facts: Facts, attempt: AttemptFacts, watch: Deadlines) -> Verdict | None:
    for node in facts.gang:
        if node.trouble:
            evidence = (node.trouble_tail,) if node.trouble_tail else ()
            return _verdict(
                facts, Kind.LAUNCH, f"{node.name}: {node.trouble}", node=node.name, evidence=evidence,
                signature=f"launch {node.trouble}", since_s=node.contact_at,
            )  # fmt: skip
        if node.hopeless and facts.pool is None:
            summary = f"{node.name}: its agent could not be started, {node.launch_failures} times: {node.launch_reason}"
            return _verdict(
                facts, Kind.LAUNCH, summary, node=node.name, evidence=(node.launch_reason,), retry=False,
                since_s=attempt.began_at,
            )  # fmt: skip
    return None


def _cannot_meet(facts: Facts, attempt: AttemptFacts, watch: Deadlines) -> Verdict | None:
    if attempt.placed_at is None or attempt.phase is not Phase.PREPARE:
        return None
    if not facts.gang[0].addresses or not rendezvous.are_probed(facts, attempt):
        return None
    place = rendezvous.rendezvous_point(facts)
    if isinstance(place, rendezvous.RendezvousPoint):
        return None
    node, first = place.node, place.first
    tried = "; ".join(place.tried) or "it reaches other addresses of it than the rest of the nodes do"
    summary = f"{node.name} cannot reach {first.name}, where the ranks meet: {tried}"
    culprit = first if _is_alone(facts, first) else node
    return _verdict(
        facts, Kind.RENDEZVOUS, summary, node=culprit.name, signature=f"{APART}{node.name} {first.name}",
        evidence=tuple(_reach(other) for other in facts.gang[1:]), since_s=node.contact_at,
    )  # fmt: skip


def _is_alone(facts: Facts, first: NodeFacts) -> bool:
    """Tell whether it is the first node itself that nobody reaches: none of several, or one after the other."""
    others = facts.gang[1:]
    before = [past.verdict for past in facts.past if past.verdict and past.number > facts.resumed_after]
    again = any(v.signature.startswith(APART) and v.signature.endswith(f" {first.name}") for v in before)
    return not any(node.reached for node in others) and (len(others) > 1 or again)


def _reach(node: NodeFacts) -> str:
    reached = ", ".join(f"{one.address} over {one.interface}" for one in node.reached) or "nothing"
    return f"{node.name} reaches {reached}" + (f"; not {'; '.join(node.missed)}" if node.missed else "")


def _crashed(facts: Facts, attempt: AttemptFacts, watch: Deadlines) -> Verdict | None:
    failed = sorted((rank for rank in facts.ranks.values() if rank.failed), key=lambda r: (r.died_at, r.rank))
    if not failed:
        return None
    culprits = [rank for rank in failed if not looks_like_victim(rank)]
    if culprits:
        ended = _was_ended(culprits[0]) and allocation.may_be_taken(facts, culprits[0].died_at, watch)
        return None if ended else _crash(facts, culprits[0], failed)
    if any(node.lost for node in facts.nodes.values()):
        return None  # the lost node is the culprit, and has its own verdict
    first = failed[0]
    if not watch.passed(first.died_at + SETTLE_S):
        return None
    assert facts.limits is not None
    quiet = [
        node for node in facts.nodes.values() if node.contact_at < first.died_at and facts.unfinished(node)
    ]
    if not quiet:
        return _crash(facts, first, failed)
    if not watch.passed(first.died_at + facts.limits.node_silent_s_max):
        return None  # a node that has not spoken since may be the culprit
    silent_s = watch.now_s - quiet[0].contact_at
    return _lost(facts, quiet[0], f"no word for {silent_s:.0f} s, and its peers lost their connections to it")


def _crash(facts: Facts, culprit: RankFacts, failed: list[RankFacts]) -> Verdict:
    kind = _crash_kind(facts, culprit)
    others = [rank.rank for rank in failed if rank is not culprit]
    left = [rank for rank in facts.ranks.values() if rank.rank_state is RankState.EXITED and not rank.failed]
    blamed = [culprit]
    failure = culprit.failure
    pid = f" (pid {culprit.pid})" if culprit.pid else ""  # it may end before its start was told
    evidence = [f"rank {culprit.rank} on {culprit.node}{pid} {_how_it_ended(culprit)}"]
    if culprit.oom:
        evidence.append(f"the kernel's OOM killer was at work on {culprit.node} during this attempt")
    if others:
        evidence.append(f"after it ended badly: ranks {_ranks_text(others)}")
    gone = ""
    if looks_like_victim(culprit) and left:
        numbers = [rank.rank for rank in left]
        gone = f"{named(numbers)} ended with code 0 before the others were done: "
        evidence.append(f"before it had left in good order: ranks {_ranks_text(numbers)}")
        blamed = left if 2 * len(left) <= len(facts.ranks) else blamed  # else it is the one that was not done
    meaning = explain(f"{failure.message}\n{failure.traceback}") if failure is not None else ""
    evidence += [meaning] if meaning else []
    if failure is not None and not failure.type and culprit.code:
        evidence.append(f"its log ends with: {failure.message}")
    elif failure is not None and (failure.traceback or not failure.type):
        evidence.append(failure.traceback or failure.message)
    what = (
        f"{failure.type}: {_first_line(failure.message)}"
        if failure and failure.type
        else _how_it_ended(culprit)
    )
    place = f" at {failure.where}" if failure and failure.where else ""
    hopeless = failure is not None and failure.type in HOPELESS and not culprit.steps
    never = facts.limits is not None and culprit.code in facts.limits.never_on_exit_codes
    step = facts.attempt.base_step + culprit.steps if facts.attempt and culprit.steps else facts.step
    return _verdict(
        facts, kind, f"{gone}rank {culprit.rank} on {culprit.node}: {what}{place}",
        ranks=tuple(rank.rank for rank in blamed), node=node_of(blamed), evidence=tuple(evidence),
        signature=_signature(kind, culprit), since_s=culprit.died_at, step=step, retry=not (hopeless or never),
    )  # fmt: skip


def _crash_kind(facts: Facts, rank: RankFacts) -> Kind:
    text = f"{rank.failure.type} {rank.failure.message}" if rank.failure else ""
    if _CUDA_OOM.search(text) or text.startswith("MemoryError") or (rank.oom and rank.signal == _SIGKILL):
        return Kind.OOM
    if not rank.steps and _RENDEZVOUS.search(text):
        return Kind.RENDEZVOUS
    return Kind.CRASH


def _signature(kind: Kind, rank: RankFacts) -> str:
    """Name the failure so that its return is recognised: an exception by type and place whoever raises it, a
    signal by the rank it hit."""
    if rank.failure is not None and rank.failure.type:
        return f"{kind.value} {rank.failure.type} {rank.failure.where}"
    if rank.signal:
        return f"{kind.value} signal {rank.signal} rank {rank.rank}"
    return f"{kind.value} code {rank.code}"


def _how_it_ended(rank: RankFacts) -> str:
    if rank.signal:
        return f"was killed by {_SIGNALS.get(rank.signal, 'signal')} ({rank.signal})"
    return f"exited with code {rank.code}"


_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
            9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM"}  # fmt: skip


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""


def _ranks_text(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return shown if len(ranks) <= 16 else f"{shown} and {len(ranks) - 16} more"


def _node_lost(facts: Facts, attempt: AttemptFacts, watch: Deadlines) -> Verdict | None:
    if attempt.phase is not Phase.RUN:
        return _lost_before_start(facts, attempt, watch)
    for node in facts.nodes.values():
        if node.lost and not allocation.may_be_taken(facts, node.lost_at, watch):
            return _lost(facts, node, node.lost)
    for node in facts.nodes.values():
        if (
            node.agent_state in (AgentState.UP, AgentState.SILENT)
            and facts.unfinished(node)
            and _silent_too_long(facts, node, watch)
        ):
            silent_s = watch.now_s - node.contact_at
            return _lost(facts, node, f"no word for {silent_s:.0f} s, and no progress of the gang")
    return None


def _lost_before_start(facts: Facts, attempt: AttemptFacts, watch: Deadlines) -> Verdict | None:
    """A placed node of a pool that is lost before its ranks were started: others may take its place."""
    assert facts.limits is not None
    if facts.pool is None or attempt.placed_at is None:
        return None
    for node in facts.gang:
        if node.agent_state is AgentState.ABSENT:
            reason = f": {node.launch_reason}" if node.launch_reason else ""
            return _lost(facts, node, f"its agent was lost before its ranks were started{reason}")
        if node.agent_state is AgentState.SILENT and watch.passed(
            node.contact_at + facts.limits.node_silent_s_max
        ):
            return _lost(
                facts, node, f"no word for {watch.now_s - node.contact_at:.0f} s before its ranks started"
            )
    return None


def _silent_too_long(facts: Facts, node: NodeFacts, watch: Deadlines) -> bool:
    assert facts.limits is not None
    return watch.passed(max(node.contact_at, facts.stepped_at) + fence.silent_s(facts, node))


def _lost(facts: Facts, node: NodeFacts, how: str) -> Verdict:
    victims = [rank.rank for rank in facts.ranks.values() if rank.failed]
    evidence = [f"{node.name}: {how}"]
    if victims:
        evidence.append(f"ranks {_ranks_text(victims)} ended as its victims")
    return _verdict(
        facts, Kind.NODE_LOST, f"{node.name} (ranks {_ranks_text(list(node.ranks))}): {how}", ranks=node.ranks,
        node=node.name, evidence=tuple(evidence), signature=f"node_lost {node.name}",
        since_s=max(facts.stepped_at, node.contact_at),
    )  # fmt: skip


def _start_took_too_long(facts: Facts, attempt: AttemptFacts, watch: Deadlines) -> Verdict | None:
    if attempt.running_at is not None or placement.is_queued(facts):
        return None
    assert facts.limits is not None
    since_s = max(attempt.watched_at, attempt.queued_at)
    if not watch.passed(since_s + facts.limits.start_s_max):
        return None
    unstarted = [node for node in facts.gang or facts.nodes.values() if node.started < attempt.number]
    unstarted.sort(key=lambda node: _is_ready(node, attempt))  # those that are ready wait for the others
    missing = [f"{node.name}: {_stage(node, attempt)}" for node in unstarted]
    summary = f"not all ranks were started within {facts.limits.start_s_max:g} s; {missing[0]}"
    return _verdict(facts, Kind.START_TIMEOUT, summary, evidence=tuple(missing), since_s=attempt.began_at)


def _stage(node: NodeFacts, attempt: AttemptFacts) -> str:
    if node.agent_state is not AgentState.UP:
        reason = f" ({node.launch_reason})" if node.launch_reason else ""
        return f"its agent is {node.agent_state.value}{reason}"
    return "its ranks were not started" if _is_ready(node, attempt) else "its setup has not ended"


def _is_ready(node: NodeFacts, attempt: AttemptFacts) -> bool:
    return node.agent_state is AgentState.UP and node.ready == attempt.number
