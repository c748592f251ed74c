"""Crashes: the verdicts `crash`, `oom` and `rendezvous`, on a rank that ended badly.

The culprit is the first rank whose end does not look like that of a victim. Where all look like victims, the verdict
waits a moment for the culprit, and longer for a node that has been silent since.
"""

from __future__ import annotations

import re

from orchestrator.brain.diagnosis import node_lost
from orchestrator.brain.diagnosis.hang_report import node_of
from orchestrator.brain.diagnosis.library_errors import explain
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Kind, Verdict
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.brain.model.verdicts import verdict_on
from orchestrator.brain.scheduling import allocation
from orchestrator.core.text import named

SETTLE_S = 1.0
"""How long a failure that looks like a victim's waits for its culprit. gloo tells peers within a second."""

HOPELESS = ("SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError")
"""Exceptions that a restart cannot mend, when they come before the first step."""

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

_SIGABRT = 6
_SIGKILL = 9
_SIGTERM = 15


def judge(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on ranks that ended badly, or None; deadlines still ahead are left in `deadlines`."""
    if not facts.exited:
        return None
    failed = sorted((rank for rank in facts.ranks.values() if rank.failed), key=lambda r: (r.died_at, r.rank))
    if not failed:
        return None
    culprits = [rank for rank in failed if not looks_like_victim(rank)]
    if culprits:
        ended = _was_ended(culprits[0]) and allocation.may_be_taken(facts, culprits[0].died_at, deadlines)
        return None if ended else _crash(facts, culprits[0], failed)
    if any(node.lost for node in facts.nodes.values()):
        return None  # the lost node is the culprit, and has its own verdict
    first = failed[0]
    if not deadlines.passed(first.died_at + SETTLE_S):
        return None
    assert facts.limits is not None
    quiet = [
        node for node in facts.nodes.values() if node.contact_at < first.died_at and facts.unfinished(node)
    ]
    if not quiet:
        return _crash(facts, first, failed)
    if not deadlines.passed(first.died_at + facts.limits.node_silent_s_max):
        return None  # a node that has sent nothing since may be the culprit
    silent_s = deadlines.now_s - quiet[0].contact_at
    return node_lost.verdict(
        facts, quiet[0], f"no word for {silent_s:.0f} s, and its peers lost their connections to it"
    )


def _crash(facts: Facts, culprit: RankFacts, failed: list[RankFacts]) -> Verdict:
    kind = _crash_kind(facts, culprit)
    others = [rank.rank for rank in failed if rank is not culprit]
    ended = [rank for rank in facts.ranks.values() if rank.rank_state is RankState.EXITED and not rank.failed]
    blamed = [culprit]
    failure = culprit.failure
    pid = f" (pid {culprit.pid})" if culprit.pid else ""  # it may end before its start was reported
    evidence = [f"rank {culprit.rank} on {culprit.node}{pid} {_how_it_ended(culprit)}"]
    if culprit.oom:
        evidence.append(f"the kernel's OOM killer was at work on {culprit.node} during this attempt")
    if others:
        evidence.append(f"after it ended badly: {named(others)}")
    gone = ""
    if looks_like_victim(culprit) and ended:
        numbers = [rank.rank for rank in ended]
        gone = f"{named(numbers)} ended with code 0 before the others were done: "
        evidence.append(f"before it had left in good order: {named(numbers)}")
        # Where most have ended, the one that was not done is to blame.
        blamed = ended if 2 * len(ended) <= len(facts.ranks) else blamed
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
    return verdict_on(
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
    """Name the failure so that its return is recognised: an exception by type and place whichever rank raises it, a
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


def looks_like_victim(rank: RankFacts) -> bool:
    """Tell whether the rank ended as ranks do whose peer has gone."""
    if rank.failure is None or not rank.failure.type:
        return rank.signal == _SIGABRT  # NCCL's watchdog ends a rank whose peers are gone by abort()
    text = f"{rank.failure.type} {rank.failure.message}"
    return bool(_VICTIM_TYPES.search(rank.failure.type) and _VICTIM.search(text))


def _was_ended(rank: RankFacts) -> bool:
    """Tell whether TERM ended the rank, or an exit code says so in the words of a shell."""
    return rank.signal == _SIGTERM or rank.code == 128 + _SIGTERM
