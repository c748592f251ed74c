"""Repeated failures: an attempt that fails like the previous one makes no progress, and the next one would fail the
same way."""

from __future__ import annotations

import dataclasses

from orchestrator.brain.model.decisions import Evidence, EvidenceKind, FailureCause, Verdict, VerdictKind
from orchestrator.brain.model.facts import AttemptFacts, Facts, PastAttempt
from orchestrator.brain.scheduling import placement
from orchestrator.brain.scheduling.checkpoints import (
    IGNORED_CHECKPOINT,
    IGNORED_CHECKPOINT_HINT,
    find_unloadable,
    ignored_checkpoint_text,
)

ALIKE_MAX = 4
"""How many attempts in a row may be resumed and fail after the same number of steps of their own. A script that always
overwrites one checkpoint does not show whether it begins from it; failing equally far along each time does."""

_OWN_FAULTS = (VerdictKind.CRASH, VerdictKind.OOM, VerdictKind.HANG, VerdictKind.LAUNCH)
"""Failures that the job's own code can cause; a lost node or a port in use may recur without its fault."""


def mark_repeated(facts: Facts, attempt: AttemptFacts, verdict: Verdict) -> Verdict:
    """Return the verdict, as `no_progress` if the same failure happened before, with evidence of an ignored checkpoint."""
    ignored = ignored_checkpoint_text(attempt)
    if ignored:
        verdict = dataclasses.replace(verdict, proof=(Evidence(ignored), *verdict.proof))
    earlier = [past for past in facts.past_attempts if past.number > facts.resumed_after]
    if earlier and _fails_loading_any(facts, earlier[-1], attempt, verdict):
        checkpoints = " and ".join(one.resume.path for one in (earlier[-1].attempt, attempt) if one.resume)
        what = f"the same failure from {checkpoints}: the cause is not the files, but {verdict.signature.frame}"
        return _no_progress_verdict(verdict, what, earlier[-1])
    if (bad_checkpoint := find_unloadable(facts, attempt, verdict)) is not None:
        given_up = f"{bad_checkpoint.save.main} is distrusted, an older checkpoint is used: {bad_checkpoint.why}"
        return dataclasses.replace(verdict, proof=(Evidence(given_up), *verdict.proof))
    is_own_fault = verdict.kind in _OWN_FAULTS and verdict.signature.cause is not FailureCause.PLACEMENT
    if not earlier or not verdict.retry or not is_own_fault:
        return verdict
    if _is_same_point(earlier[-1], attempt, verdict) and not _may_be_host_fault(facts, earlier[-1], verdict):
        at = f"step {verdict.step}" if verdict.step is not None else "the same point, before any step"
        return _no_progress_verdict(verdict, f"the same failure again at {at}", earlier[-1])
    if _are_equally_far(earlier, attempt, verdict):
        own_steps = f"{attempt.own_steps(verdict)} steps of its own"
        repeated = f"the same failure in {ALIKE_MAX} attempts in a row, each resumed and failed after {own_steps}"
        hint = () if ignored else (Evidence(f"{IGNORED_CHECKPOINT} ({IGNORED_CHECKPOINT_HINT})"),)
        return _no_progress_verdict(verdict, repeated, earlier[-1], hint)
    return verdict


def _fails_loading_any(facts: Facts, past: PastAttempt, attempt: AttemptFacts, verdict: Verdict) -> bool:
    """Return whether the previous attempt has raised the same at the same line, from another checkpoint, and neither has got any
    further: then the code that loads them is the cause."""
    checkpoints = past.attempt.resume, attempt.resume
    is_alike = past.verdict is not None and past.verdict.signature == verdict.signature
    is_raised = verdict.signature.cause is FailureCause.EXCEPTION and verdict.signature.frame is not None
    has_advanced = (
        past.attempt.own_steps_at_failure or past.has_progressed or facts.steps_made or facts.has_progressed()
    )
    return is_alike and is_raised and None not in checkpoints and checkpoints[0] != checkpoints[1] and not has_advanced


def _is_same_point(past: PastAttempt, attempt: AttemptFacts, verdict: Verdict) -> bool:
    """Return whether the previous attempt failed in the same way: at the same step, or as far from the same checkpoint.

    Two that made no step of their own from different checkpoints only show that they could not begin from these, though
    both may be of one step. Where no step is known, a signal does not count: it may have come from outside, at a
    different place each time.
    """
    if past.verdict is None or past.verdict.signature != verdict.signature:
        return False
    from_others = past.attempt.resume != attempt.resume and None not in (past.attempt.resume, attempt.resume)
    if from_others and not past.attempt.own_steps_at_failure and not attempt.own_steps(verdict):
        return False
    if verdict.step is None and verdict.signature.cause in (FailureCause.SIGNAL, FailureCause.STOPPED):
        return False
    count = attempt.own_steps(verdict)
    as_far = (past.attempt.resume, past.attempt.own_steps_at_failure) == (attempt.resume, count)
    return as_far or past.failed_step == verdict.step


def _may_be_host_fault(facts: Facts, past: PastAttempt, verdict: Verdict) -> bool:
    """Return whether ranks of one host hung both times; the host is now replaced by another, which shows whether it was the
    cause."""
    on_one = past.verdict is not None and past.verdict.node == verdict.node != ""
    return verdict.kind is VerdictKind.HANG and on_one and placement.has_another(facts)


def _are_equally_far(earlier: list[PastAttempt], attempt: AttemptFacts, verdict: Verdict) -> bool:
    """Return whether the last attempts, including this one, all failed in this way after the same number of
    their own steps."""
    count = attempt.own_steps(verdict)
    alike = [
        past
        for past in earlier[1 - ALIKE_MAX :]
        if past.verdict is not None
        and past.verdict.signature == verdict.signature
        and past.attempt.own_steps_at_failure == count
        and _is_resume_unproven(past.attempt)
    ]
    return bool(count) and len(alike) == ALIKE_MAX - 1 and _is_resume_unproven(attempt)


def _is_resume_unproven(attempt: AttemptFacts) -> bool:
    """Return whether the attempt was given a checkpoint, and nothing that it wrote proves that it resumed from it."""
    return attempt.resume is not None and not attempt.began_from_checkpoint


def _no_progress_verdict(verdict: Verdict, again: str, last: PastAttempt, hint: tuple[Evidence, ...] = ()) -> Verdict:
    assert last.verdict is not None
    likewise = Evidence(f"attempt {last.number} failed in the same way: {last.verdict.summary}", EvidenceKind.LIKEWISE)
    return dataclasses.replace(
        verdict, kind=VerdictKind.NO_PROGRESS, head=f"{again}: {verdict.head}", retry=False,
        proof=(likewise, *hint, *verdict.proof),
    )  # fmt: skip
