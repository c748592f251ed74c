"""What is written down of one attempt? A page of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.brain.model import decisions as d


@dataclass(slots=True)
class Try:
    """The books of one attempt."""

    number: int
    base: int  # where it began: as it was told to, until its checkpoints show that it did not
    begun: d.BeginAttempt
    anew: bool = False
    high: int = 0  # the most steps that any rank was heard to have made
    verdict: d.Verdict | None = None
    judged_s: float = 0.0
    judged_anew: bool = False  # its beginning was known when its verdict fell
    counts: dict[int, int] = field(default_factory=dict)  # steps of the ranks that have ended
    prepared: dict[str, tuple[str, int]] = field(default_factory=dict)
    ok: list[int] = field(default_factory=list)
    call: int = 1  # the launcher call whose ranks run, which call each node has come to, and whose scripts ended well
    came: dict[str, int] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)


def fault(attempt: Try) -> tuple[d.FailureSignature, int] | None:
    """Name an attempt's own failure, None if it had none: what happened, and after how many of its steps."""
    verdict = attempt.verdict
    own = (d.VerdictKind.CRASH, d.VerdictKind.OOM, d.VerdictKind.NO_PROGRESS)
    if verdict is None or verdict.kind not in own or not verdict.ranks:
        return None
    count = attempt.counts.get(verdict.ranks[0], 0)
    return (verdict.signature, count) if count else None


def goes_round(past: Sequence[Try]) -> bool:
    """Tell whether the last attempts of a script that ignores its checkpoint ended alike: the last two that are known
    to have begun anew, or the last four that were told to resume."""
    if past[-1].verdict is None or not fault(past[-1]):
        return False
    alike = [fault(one) == fault(past[-1]) for one in past]
    known = len(past) >= 2 and alike[-2] and past[-2].anew and past[-1].judged_anew
    told = [one.begun.resume is not None and same for one, same in zip(past, alike, strict=True)]
    return known or (len(past) >= 4 and all(told[-4:]))
