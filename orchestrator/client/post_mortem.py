"""Post-mortem of a job, attempt by attempt: its record as `orch why --json` prints it.

Pure: a record in, the JSON object of the contract out. Times of day are UTC in ISO 8601, durations are seconds.
"""

from __future__ import annotations

from orchestrator.brain.model.facts import Phase
from orchestrator.core.codec import Json
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import iso
from orchestrator.supervisor import status
from orchestrator.supervisor.journal.job_record import AttemptHistory, Record, Told


def why(plan: Plan, record: Record) -> Json:
    """Return the post-mortem as `orch why --json` prints it."""
    is_going = record.facts.end is None
    newest = record.facts.checkpoint
    shown = []
    for number, attempt in enumerate(record.attempts):
        after = record.attempts[number + 1] if number + 1 < len(record.attempts) else None
        current = record.facts.attempt
        goes_on = is_going and after is None and (current is None or current.phase is not Phase.STOP)
        shown.append(_attempt(attempt, after, goes_on))
    return {
        "id": plan.id,
        "name": plan.name,
        "state": status.state(record.facts),
        "reason": status.reason(record.facts),
        "checkpoint": {"path": newest.path, "step": newest.step} if newest else None,
        "hosts": list(record.facts.host_findings),
        "attempts": shown,
    }


def _attempt(attempt: AttemptHistory, after: AttemptHistory | None, goes_on: bool) -> Json:
    ended = attempt.ended_wall_s
    return {
        "attempt": attempt.attempt,
        "why": attempt.why,
        "started_at": iso(attempt.began_wall_s),
        "ended_at": None if goes_on or ended is None else iso(ended),
        "first_step": attempt.base_step + 1 if attempt.last_step is not None else None,
        "last_step": attempt.last_step,
        "resumed_from": attempt.resumed_from,
        "resumed_step": attempt.resumed_step,
        "passed": [
            {"save": one.save, "path": one.main, "step": one.step, "why": one.why} for one in attempt.passed
        ],
        "verdict": _verdict(attempt),
        "restart_s": _restart_s(attempt, after),
        "queued_s": None if attempt.queued_s is None else round(attempt.queued_s, 3),
        "repeated_steps": _repeated(attempt, after),
        "notices": attempt.notices,
        "told": [_alert(alert) for alert in attempt.told],
        "remarks": attempt.remarks,
        "starts": attempt.starts,
        "job_end": attempt.job_end,
        "ended_why": attempt.ended_why,
    }


def _alert(alert: Told) -> Json:
    return {"what": alert.what, "kind": alert.kind, "text": alert.text, "at": iso(alert.wall_s)}


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
