"""What went wrong, attempt by attempt? The record of a job, as `orch why --json` tells it.

Pure: a record in, the JSON object of the contract out. Times of day are UTC in ISO 8601, durations are seconds.
"""

from __future__ import annotations

from orchestrator.brain.model.facts import Phase
from orchestrator.core.codec import Json
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import iso
from orchestrator.supervisor import status
from orchestrator.supervisor.journal.job_record import AttemptHistory, Record, Told


def why(plan: Plan, told: Record) -> Json:
    """Return the post-mortem as `orch why --json` prints it."""
    going = told.facts.end is None
    newest = told.facts.checkpoint
    shown = []
    for number, attempt in enumerate(told.attempts):
        after = told.attempts[number + 1] if number + 1 < len(told.attempts) else None
        current = (
            going
            and after is None
            and (told.facts.attempt is None or told.facts.attempt.phase is not Phase.STOP)
        )
        shown.append(_attempt(attempt, after, current))
    return {
        "id": plan.id,
        "name": plan.name,
        "state": status.state(told.facts),
        "reason": status.reason(told.facts),
        "checkpoint": {"path": newest.path, "step": newest.step} if newest else None,
        "attempts": shown,
    }


def _attempt(attempt: AttemptHistory, after: AttemptHistory | None, going: bool) -> Json:
    ended = attempt.ended_wall_s
    return {
        "attempt": attempt.attempt,
        "why": attempt.why,
        "started_at": iso(attempt.began_wall_s),
        "ended_at": None if going or ended is None else iso(ended),
        "first_step": attempt.base_step + 1 if attempt.last_step is not None else None,
        "last_step": attempt.last_step,
        "resumed_from": attempt.resumed_from,
        "verdict": _verdict(attempt),
        "restart_s": _restart_s(attempt, after),
        "queued_s": None if attempt.queued_s is None else round(attempt.queued_s, 3),
        "repeated_steps": _repeated(attempt, after),
        "notices": attempt.notices,
        "told": [_told(one) for one in attempt.told],
        "remarks": attempt.remarks,
        "job_end": attempt.job_end,
        "ended_why": attempt.ended_why,
    }


def _told(one: Told) -> Json:
    return {"what": one.what, "kind": one.kind, "text": one.text, "at": iso(one.wall_s)}


def _verdict(attempt: AttemptHistory) -> Json | None:
    if attempt.verdict is None or attempt.judged_at is None:
        return None
    return status.verdict(attempt.verdict, attempt.judged_at)


def _restart_s(attempt: AttemptHistory, after: AttemptHistory | None) -> float | None:
    if after is None or attempt.judged_at is None or after.restart_at is None:
        return None
    return round(after.restart_at - attempt.judged_at, 3)


def _repeated(attempt: AttemptHistory, after: AttemptHistory | None) -> int | None:
    """Return how many steps were lost: made by this attempt, and made again by the next."""
    if after is None or attempt.last_step is None:
        return None
    return max(0, attempt.last_step - after.base_step)
