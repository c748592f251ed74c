"""Crashes: the verdicts `crash`, `oom` and `rendezvous`, on a rank that ended badly.

The culprit is the first rank whose end does not look like that of a victim. Where all look like victims, the verdict
waits a moment for the culprit, and longer for a node that has been silent since; then the first is the culprit whose
exception is not of torch.distributed, gloo, NCCL or the store.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from orchestrator.brain.diagnosis import hang, hang_report, node_lost
from orchestrator.brain.diagnosis.hang_report import common_node
from orchestrator.brain.diagnosis.library_errors import explain, is_mismatch, is_timeout
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Evidence, EvidenceKind, FailureCause, Verdict, VerdictKind
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.brain.scheduling import allocation
from orchestrator.core.status_types import Frame
from orchestrator.core.text import ranks_label

SETTLE_S = 1.0
RENDEZVOUS_SETTLE_S = 5.0
"""How long a failure that looks like a victim's waits for its culprit. gloo notifies peers within a second; at the
rendezvous each rank waits for its own time limit, which began when it arrived."""

UNRECOVERABLE = ("SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError", "bdb.BdbQuit")
"""Exceptions before the first step that a restart cannot fix."""

_VICTIM = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|error)|remote process exited"
    r"|communicator was aborted|process ?group .*abort|peer|timed out (waiting|after)|wait timeout after|recvvalue failed"
    r"|watchdog caught collective",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and the store in a rank whose peer is gone."""

_VICTIM_TYPES = re.compile(
    r"(torch\.(\w+\.)*)?(RuntimeError|Dist\w*Error|Connection\w*Error|BrokenPipeError|TimeoutError)"
)
"""Python's and torch's own: those of other packages (requests, redis) are of the rank's own connections."""

_OWN_WAIT = re.compile(r"DataLoader|\block\b|peer access", re.IGNORECASE)
"""Other things that a rank may wait for in vain, or cannot reach."""

_GANG_ERROR = re.compile(
    r"gloo|nccl|c10d|torch[./]distributed[./](?!elastic)|TCPStore|process ?group|Dist\w+Error", re.IGNORECASE
)
"""Matches an exception, or its traceback, that came from the connections between ranks."""

_RENDEZVOUS = re.compile(
    r"address already in use|EADDRINUSE|server socket has failed to listen|client socket has (failed|timed out)"
    r"|Failed to recv, got 0 bytes|wait timeout after|clients joined",
    re.IGNORECASE,
)
_ADDRESS_ERROR = re.compile(
    r"address already in use|EADDRINUSE|failed to listen|while trying to connect", re.IGNORECASE
)
"""Messages of the store in a rank that could not use an address; the other ranks only wait for that rank."""

_CUDA_OOM = re.compile(r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")

_MEMORY_FULL = "rank {0.rank}: no room for its checkpoint in memory (checkpoint.memory, {0.memory_full}): the next attempt writes to disk"

_SIGABRT = 6
_SIGKILL = 9
_SIGTERM = 15
_FATAL = frozenset({4, _SIGABRT, 7, 8, 11})
"""SIGILL, SIGABRT, SIGBUS, SIGFPE and SIGSEGV, as Linux numbers them."""


def judge(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on ranks that ended badly, or None; deadlines still ahead are left in `deadlines`."""
    if not facts.exited_count:
        return None
    failed = sorted((rank for rank in facts.ranks.values() if rank.failed), key=lambda r: (r.died_at, r.rank))
    if not failed:
        return None
    culprits = [rank for rank in failed if not looks_like_victim(rank)]
    if culprits:
        ended = _was_terminated(culprits[0]) and allocation.may_be_queue_action(facts, culprits[0].died_at, deadlines)
        return None if ended else _crash_verdict(facts, culprits[0], failed)
    if any(node.agent_loss for node in facts.nodes.values()):
        return None  # the lost node is the culprit, and has its own verdict
    first = min(failed, key=lambda rank: (not _ADDRESS_ERROR.search(_log_text(rank)), _is_gang_error(rank)))
    is_rendezvous = _crash_kind(facts, first) is VerdictKind.RENDEZVOUS and not _ADDRESS_ERROR.search(_log_text(first))
    # The peer of a mismatch is as likely the culprit: its place counts, too.
    peer_comes = is_mismatch(_log_text(first)) and len(failed) == 1
    if not deadlines.passed(failed[0].died_at + (RENDEZVOUS_SETTLE_S if is_rendezvous or peer_comes else SETTLE_S)):
        return None
    assert facts.limits is not None
    silent_nodes = [
        node for node in facts.nodes.values() if node.contact_at < first.died_at and facts.is_unfinished(node)
    ]
    if not silent_nodes:
        return _crash_verdict(
            facts, first, failed, hang.find_awaited(facts, attempt) if is_timeout(_log_text(first)) else []
        )
    if not deadlines.passed(first.died_at + facts.limits.node_timeout_s):
        return None  # a node that has sent nothing since may be the culprit
    silent_s = deadlines.now_s - silent_nodes[0].contact_at
    return node_lost.lost_verdict(
        facts,
        silent_nodes[0],
        f"no heartbeat for {silent_s:.0f} s, and its peers lost their connections to it",
    )


def _crash_verdict(
    facts: Facts, culprit: RankFacts, failed: list[RankFacts], awaited_ranks: Sequence[RankFacts] = ()
) -> Verdict:
    """`awaited_ranks`: the ranks that others waited for until torch's own time limit ended them."""
    kind = _crash_kind(facts, culprit)
    other_failures = [rank.rank for rank in failed if rank is not culprit]
    ended = [rank for rank in facts.ranks.values() if rank.rank_state is RankState.EXITED and not rank.failed]
    blamed = [culprit]
    failure = culprit.failure
    notes = _process_notes(culprit)
    if culprit.signal == _SIGKILL:
        notes.append(
            f"out of memory (OOM kill on {culprit.node} during this attempt)"
            if culprit.is_oom
            else f"not out of memory (no OOM kill on {culprit.node} during this attempt)"
        )
    notes += culprit.gpu_users
    notes += [_MEMORY_FULL.format(culprit)] if culprit.memory_full else []
    if other_failures:
        notes.append(f"after it ended badly: {_describe_places([rank for rank in failed if rank is not culprit])}")
    if facts.attempt is not None and facts.attempt.call > 1:
        notes.append(f"in launcher call {facts.attempt.call}; the next attempt runs the script from its first line")
    early_exit = ""
    if looks_like_victim(culprit) and ended:
        numbers = [rank.rank for rank in ended]
        early_exit = f"{ranks_label(numbers)} ended with code 0 before the others were done: "
        notes.append(f"exited with code 0 before it: {ranks_label(numbers)}")
        # Where most have ended, the rank that was not done is the culprit.
        blamed = ended if 2 * len(ended) <= len(facts.ranks) else blamed
    waited_for = ""
    if awaited_ranks and facts.attempt is not None:
        blamed, waited_for = list(awaited_ranks), hang_report.describe_culprits(facts.attempt, awaited_ranks)
    explanation = explain(f"{_message(culprit)}\n{failure.traceback}" if failure else "")
    notes += [explanation] if explanation else []
    proof = [
        *map(Evidence, notes),
        *(hang_report.uneven_input_evidence(facts) if early_exit else ()),
        *_output_evidence(culprit),
    ]
    at = f" at {failure.where}" if failure and failure.where else ""
    what = failure.text if failure and failure.type else f"{_how_it_ended(culprit)}{at}"
    cause, place, frames = _cause(culprit)
    is_unrecoverable = failure is not None and failure.type in UNRECOVERABLE and not culprit.steps
    is_never_restarted = facts.limits is not None and culprit.code in facts.limits.never_on_exit_codes
    step = facts.attempt.call_step + culprit.steps if facts.attempt and culprit.steps else facts.step
    return facts.verdict_on(
        kind, f"{early_exit}rank {culprit.rank} on {culprit.node}: {what}",
        ranks=tuple(rank.rank for rank in blamed), node=common_node(blamed), proof=tuple(proof),
        cause=cause, place=place, frames=frames, since_s=culprit.died_at, step=step, retry=not (is_unrecoverable or is_never_restarted), culprit=waited_for,
    )  # fmt: skip


def _process_notes(rank: RankFacts) -> list[str]:
    """Return what the head omits: the process, and for an exception how it ended the rank."""
    pid = f"pid {rank.pid}" if rank.pid else ""  # it may end before its start was reported
    if rank.failure is None or not rank.failure.type:
        return [pid] if pid else []
    return [f"rank {rank.rank} on {rank.node}{f' ({pid})' if pid else ''} {_how_it_ended(rank)}"]


def _output_evidence(rank: RankFacts) -> list[Evidence]:
    """Return the output of a rank that ended badly: its traceback, or the end of its log."""
    failure = rank.failure
    if failure is None:
        return []
    if not failure.type and rank.code and not failure.traceback:
        return [Evidence(f"its log ends with: {failure.message}")]
    pieces = []
    if not failure.type and failure.message:
        pieces.append(Evidence(failure.message, EvidenceKind.OUTPUT))
    if failure.traceback:
        pieces.append(Evidence(failure.traceback, EvidenceKind.TRACEBACK))
    return pieces


def _crash_kind(facts: Facts, rank: RankFacts) -> VerdictKind:
    text = _message(rank)
    if _CUDA_OOM.search(text) or text.startswith("MemoryError") or (rank.is_oom and rank.signal == _SIGKILL):
        return VerdictKind.OOM
    if not rank.steps and _RENDEZVOUS.search(text):
        return VerdictKind.RENDEZVOUS
    return VerdictKind.CRASH


def _cause(rank: RankFacts) -> tuple[FailureCause, tuple[str, ...], tuple[Frame, ...]]:
    """Name the failure so that its return is recognised: an exception by type and place whichever rank raises it, a
    signal that the rank's own code can cause by its place, any other by the rank it hit."""
    frames = (rank.failure.where,) if rank.failure is not None and rank.failure.where is not None else ()
    if rank.failure is not None and rank.failure.type:
        return FailureCause.EXCEPTION, (rank.failure.type,), frames
    if rank.signal in _FATAL and frames:
        return FailureCause.FATAL_SIGNAL, (str(rank.signal),), frames
    if rank.signal:
        return FailureCause.SIGNAL, (str(rank.signal), str(rank.rank)), ()
    return FailureCause.EXIT_CODE, (str(rank.code),), ()


def _describe_places(ranks: Sequence[RankFacts]) -> str:
    """Name ranks, those that ended at one place together."""
    ranks_by_frame: dict[Frame | None, list[int]] = {}
    for rank in ranks:
        ranks_by_frame.setdefault(rank.failure.where if rank.failure else None, []).append(rank.rank)
    return "; ".join(
        ranks_label(numbers) + (f" at {where}" if where else "") for where, numbers in ranks_by_frame.items()
    )


def _how_it_ended(rank: RankFacts) -> str:
    if rank.signal:
        return f"was killed by {_SIGNALS.get(rank.signal, 'signal')} ({rank.signal})"
    return f"exited with code {rank.code}"


_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
            9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM"}  # fmt: skip


def looks_like_victim(rank: RankFacts) -> bool:
    """Return whether the rank ended as a rank does whose peer is gone."""
    if rank.failure is None or not rank.failure.type:
        return rank.signal == _SIGABRT  # NCCL's watchdog ends a rank whose peers are gone by abort()
    if _OWN_WAIT.search(_message(rank)) and not _is_gang_error(rank):
        return False
    return bool(_VICTIM_TYPES.fullmatch(rank.failure.type) and _VICTIM.search(_message(rank)))


def _is_gang_error(rank: RankFacts) -> bool:
    return _GANG_ERROR.search(f"{_message(rank)}\n{_log_text(rank)}") is not None


def _message(rank: RankFacts) -> str:
    return f"{rank.failure.type} {rank.failure.message}" if rank.failure else ""


def _log_text(rank: RankFacts) -> str:
    return f"{rank.failure.message}\n{rank.failure.traceback}" if rank.failure else ""


def _was_terminated(rank: RankFacts) -> bool:
    return rank.signal == _SIGTERM or rank.code == 128 + _SIGTERM
