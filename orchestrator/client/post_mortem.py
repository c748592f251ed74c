"""Post-mortem of a job, attempt by attempt: its record as `orch why --json` prints it.

Pure: a record in, the JSON object of the contract out. Times of day are UTC in ISO 8601, durations are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from orchestrator.brain.model.decisions import AttemptEnd, Evidence, Notice, NoticeTopic, VerdictKind
from orchestrator.brain.model.facts import Phase
from orchestrator.core.codec import Json
from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import Status, iso
from orchestrator.core.wire.reports import Exited
from orchestrator.journal import checkpoint_interval, goodput
from orchestrator.journal.goodput import Goodput
from orchestrator.journal.job_record import AttemptHistory, Record
from orchestrator.supervisor import status

LATE_EXITS_MAX = 4
"""How many ranks are named that failed after they were asked to stop."""


def why(plan: Plan, record: Record) -> Json:
    """Return the post-mortem as `orch why --json` prints it."""
    is_running = record.facts.end is None
    newest = record.facts.checkpoint
    attempts_json = []
    for number, attempt in enumerate(record.attempts):
        next_attempt = record.attempts[number + 1] if number + 1 < len(record.attempts) else None
        current = record.facts.attempt
        is_running_attempt = (
            is_running and next_attempt is None and (current is None or current.phase is not Phase.STOP)
        )
        next_stepping = next((one for one in record.attempts[number + 1 :] if one.last_step is not None), next_attempt)
        attempts_json.append(_attempt_json(attempt, next_attempt, next_stepping, is_running_attempt))
    return {
        "id": plan.id,
        "name": plan.name,
        "state": status.state(record.facts),
        "reason": status.reason(record.facts),
        "checkpoint": {"path": newest.path, "step": newest.step} if newest else None,
        "attempts": attempts_json,
        "goodput": time_use(goodput.from_record(record, plan.created_at)),
    }


def time_use(usage: Goodput) -> Json:
    """Return the ranks' time: rank-seconds by kind, and their productive share, None without any."""
    return {
        "ratio": None if usage.ratio is None else round(usage.ratio, 4),
        "rank_seconds": {kind.value: round(rank_s, 3) for kind, rank_s in usage.rank_seconds().items()},
    }


def time_uses(
    usage_by_job: Mapping[str, Goodput], lab: Iterable[Goodput] = (), memory_stall_s: float | None = None
) -> Json:
    """Return the time use of jobs by id, together and each, as `orch goodput --json` prints it; each with its failures and
    their cost. `lab`: other jobs whose failures count for the advice on checkpoints; `memory_stall_s`: what a
    checkpoint of the one job would cost in memory."""
    known = [*usage_by_job.values(), *lab]
    jobs = [
        {
            "id": job_id,
            **time_use(one),
            "advice": checkpoint_interval.advise(one, known, memory_stall_s),
            "losses": [{**asdict(loss), "rank_seconds": round(rank_s, 3)} for loss, rank_s in one.losses().items()],
        }
        for job_id, one in usage_by_job.items()
    ]
    return {
        **time_use(Goodput(tuple(span for one in usage_by_job.values() for span in one.spans))),
        "jobs": jobs,
    }


def add_live_status(why: Json, current: Status) -> None:
    """Add the current status to the post-mortem of a running job: the journal is some seconds older."""
    if current.full_disk:
        why["full_disk"] = current.full_disk
    if current.suspicion and not current.is_late:
        shown = status_file.to_json(current)
        why |= {key: shown.get(key) for key in ("suspicion", "suspected", "written_at")}
    last = why["attempts"][-1] if why["attempts"] else None
    if last is None or (last["attempt"], why["state"]) != (current.attempt, current.state):
        return
    shown = status_file.to_json(current)
    why |= {"reason": shown["reason"], "checkpoint": shown["checkpoint"]}
    is_further = current.step is not None and any(rank.step is not None for rank in current.ranks)
    if is_further and last["ended_at"] is None:
        last["first_step"] = last["first_step"] or (last["resumed_step"] or 0) + 1
        last["last_step"] = current.step


def _attempt_json(
    attempt: AttemptHistory,
    next_attempt: AttemptHistory | None,
    next_stepping: AttemptHistory | None,
    is_running: bool,
) -> Json:
    """Return an attempt as JSON. `next_attempt`: the next one; `next_stepping`: the next one that made steps."""
    begun, judged, finished = attempt.begun, attempt.judged, attempt.finished
    ended = attempt.ended_wall_s
    verdict = judged.verdict if judged else None
    late = [_late_exit_text(node, exited) for node, exited in attempt.late_exits[:LATE_EXITS_MAX]]
    slow = [told.why for told in attempt.notices if told.topic is NoticeTopic.SLOW]
    if verdict is not None and verdict.kind in (VerdictKind.TIME_LIMIT, VerdictKind.PREEMPTED):
        verdict = replace(verdict, proof=(*verdict.proof, *map(Evidence, late)))
    return {
        "attempt": begun.attempt,
        "why": begun.why,
        "started_at": iso(attempt.began_wall_s),
        "ended_at": None if is_running or ended is None else iso(ended),
        "first_step": attempt.base_step + 1 if attempt.last_step is not None else None,
        "last_step": attempt.last_step,
        "resumed_from": begun.resume.path if begun.resume else None,
        "resumed_step": begun.resume.step if begun.resume else None,
        "began_from": None,
        "passed": [
            {"save": loser.save, "path": loser.main, "step": loser.step, "why": loser.why}
            for loser in begun.passed_over
        ],
        "verdict": status.verdict(verdict, judged.at) if judged and verdict else None,
        "restart_s": _restart_s(attempt, next_attempt),
        "restart_parts": _restart_parts(attempt, next_attempt),
        "queued_s": None if attempt.queued_s is None else round(attempt.queued_s, 3),
        "repeated_steps": _repeated_steps(attempt, next_stepping),
        "checkpoint_stalls_s": [round(stall_s, 3) for _, stall_s in attempt.stalls.values()],
        "notices": [told.verdict.summary for told in attempt.notices if told.verdict],
        "told": [_notice_json(attempt, told) for told in attempt.notices if told.topic is not NoticeTopic.SLOW],
        "remarks": [*slow, *((*_suspicion_texts(attempt), *late) if verdict is None else ())],
        "starts": list(attempt.starts),
        "fresh_starts": [how for how, are_forks in attempt.starts.items() if not are_forks],
        "job_end": attempt.job_ended.end.value if attempt.job_ended else None,
        "ended_why": finished.why if finished else None,
        "ending": finished.ending.value if finished else None,
    }


def _suspicion_texts(attempt: AttemptHistory) -> list[str]:
    """Return what looked like a hang when the user ended an attempt: no verdict says it."""
    suspected, finished = attempt.suspected, attempt.finished
    if suspected is None or finished is None or finished.ending is AttemptEnd.DONE:
        return []
    return [f"suspicion at {iso(attempt.wall_s(suspected.at))[11:19]} UTC: {suspected.why}"]


def _late_exit_text(node: str, exited: Exited) -> str:
    """Return how a rank ended after it was asked to stop."""
    what = f": {exited.failure.text}" if exited.failure is not None and exited.failure.text else ""
    return f"rank {exited.rank} on {node}, asked to stop, exited with code {exited.code}{what}"


def _notice_json(attempt: AttemptHistory, notice: Notice) -> Json:
    verdict = notice.verdict
    return {
        "what": "withdrawn" if notice.withdrawn else "noticed",
        "kind": verdict.kind.value if verdict else "",
        "text": (verdict.culprit or verdict.summary) if verdict else notice.why,
        "fix": notice.fix,
        "at": iso(attempt.wall_s(notice.at)),
    }


def _restart_s(attempt: AttemptHistory, next_attempt: AttemptHistory | None) -> float | None:
    if next_attempt is None or attempt.judged is None or next_attempt.restart_at is None:
        return None
    return round(next_attempt.restart_at - attempt.judged.at, 3)


def _restart_parts(attempt: AttemptHistory, after: AttemptHistory | None) -> Json | None:
    """Return the seconds of a restart until the old ranks had ended, the new ones ran, their process group was formed (where
    that is known), and the first step was made; None without a step, and where a later launcher call has started ranks again."""
    if after is None or attempt.judged is None or after.running_at is None or after.first_step_at is None:
        return None
    if after.running_at > after.first_step_at:
        return None
    ready_at = max(after.running_at, min(after.group_at or 0.0, after.first_step_at))
    return {
        "end_s": round(after.begun.at - attempt.judged.at, 3),
        "start_s": round(after.running_at - after.begun.at, 3),
        **({} if after.group_at is None else {"group_s": round(ready_at - after.running_at, 3)}),
        "first_step_s": round(after.first_step_at - ready_at, 3),
    }


def _repeated_steps(attempt: AttemptHistory, next_stepping: AttemptHistory | None) -> int | None:
    """Return how many steps of this attempt the next one that made steps repeated."""
    if next_stepping is None or attempt.last_step is None:
        return None
    return max(0, attempt.last_step - next_stepping.base_step)
