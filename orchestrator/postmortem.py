"""What went wrong, attempt by attempt? Replays a journal into a story, and tells it as `orch why --json` does.

Pure: journal entries in, the JSON object of the contract out. Times of day are UTC in ISO 8601, durations are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from orchestrator import story
from orchestrator.brain import decisions as d
from orchestrator.brain import events as e
from orchestrator.brain.brain import Brain
from orchestrator.brain.facts import Facts, Phase
from orchestrator.journal import Entry
from orchestrator.plan import Plan
from orchestrator.statefile import iso

Json: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class AttemptStory:
    """One attempt as the post-mortem tells it. Times are seconds since 1970, steps are the job's.

    `queued_s`: how long after it the job waited in the queue for other nodes.
    """

    attempt: int
    why: str
    began_wall_s: float
    base_step: int
    resumed_from: str | None
    ended_wall_s: float | None = None
    first_step_at: float | None = None
    running_at: float | None = None
    last_step: int | None = None
    verdict: d.Verdict | None = None
    judged_at: float | None = None
    requeued_at: float | None = None
    queued_s: float | None = None
    notices: list[str] = field(default_factory=list)
    told: list[Json] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    job_end: str | None = None
    ended_why: str | None = None

    @property
    def restart_at(self) -> float | None:
        """When the attempt got going (job clock): its first step, or its ranks' start when it makes no steps."""
        return self.first_step_at if self.first_step_at is not None else self.running_at


@dataclass(frozen=True, slots=True)
class Story:
    """A whole job, from its journal."""

    attempts: tuple[AttemptStory, ...]
    facts: Facts
    last: Entry | None


def tell(entries: Iterable[Entry]) -> Story:
    """Replay a journal and return its story."""
    brain = Brain()
    attempts: list[AttemptStory] = []
    last: Entry | None = None
    for last in entries:
        _note(attempts, last)
        brain.learn(last.news)
        if attempts:
            _follow(attempts[-1], brain.facts, last)
    return Story(tuple(attempts), brain.facts, last)


def _note(attempts: list[AttemptStory], entry: Entry) -> None:
    """Open and close attempts, and keep their verdicts."""
    match entry.news:
        case d.BeginAttempt(attempt=number, why=why, resume=resume):
            base = (resume.step or 0) if resume else 0
            attempts.append(AttemptStory(number, why, entry.wall_s, base, resume.path if resume else None))
        case d.Judge(at=at, verdict=verdict):
            attempts[-1].verdict, attempts[-1].judged_at = verdict, at
        case d.Notice(verdict=verdict):
            attempts[-1].notices.append(verdict.summary)
            words = {
                "what": "noticed",
                "kind": verdict.kind.value,
                "text": verdict.culprit or verdict.summary,
            }
            attempts[-1].told.append({**words, "at": iso(entry.wall_s)})
        case d.Finish(why=why):
            attempts[-1].ended_why = why
        case d.Withdraw(why=why) if attempts:
            words = {"what": "withdrawn", "kind": "", "text": why}
            attempts[-1].told.append({**words, "at": iso(entry.wall_s)})
        case d.Remark(why=why) if attempts:
            attempts[-1].remarks.append(why)
        case d.Requeue(at=at):
            attempts[-1].requeued_at = at
        case e.AllocationBegan(at=at) if attempts and attempts[-1].requeued_at is not None:
            attempts[-1].queued_s = at - attempts[-1].requeued_at
        case d.EndJob(end=end) if attempts:
            attempts[-1].job_end = end.value
        case _:
            return


def _follow(attempt: AttemptStory, facts: Facts, entry: Entry) -> None:
    """Keep up with the attempt's steps, its start, and the last thing that ended in it."""
    current = facts.attempt
    if current is None or current.number != attempt.attempt:
        return
    attempt.running_at = current.running_at
    attempt.base_step = current.base_step  # known better once the script is seen to have begun anew
    made = max((rank.count for rank in facts.ranks.values()), default=0)
    if made:
        attempt.last_step = attempt.base_step + made
        if attempt.first_step_at is None:
            attempt.first_step_at = entry.news.at
    if isinstance(entry.news, (e.Stopped, e.Exited, d.Judge, d.EndJob)):
        attempt.ended_wall_s = entry.wall_s


def why(plan: Plan, told: Story) -> Json:
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
        "state": story.state(told.facts),
        "reason": story.reason(told.facts),
        "checkpoint": {"path": newest.path, "step": newest.step} if newest else None,
        "attempts": shown,
    }


def _attempt(attempt: AttemptStory, after: AttemptStory | None, going: bool) -> Json:
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
        "told": attempt.told,
        "remarks": attempt.remarks,
        "job_end": attempt.job_end,
        "ended_why": attempt.ended_why,
    }


def _verdict(attempt: AttemptStory) -> Json | None:
    if attempt.verdict is None or attempt.judged_at is None:
        return None
    return story.verdict(attempt.verdict, attempt.judged_at)


def _restart_s(attempt: AttemptStory, after: AttemptStory | None) -> float | None:
    if after is None or attempt.judged_at is None or after.restart_at is None:
        return None
    return round(after.restart_at - attempt.judged_at, 3)


def _repeated(attempt: AttemptStory, after: AttemptStory | None) -> int | None:
    """Return how many steps were lost: made by this attempt, and made again by the next."""
    if after is None or attempt.last_step is None:
        return None
    return max(0, attempt.last_step - after.base_step)
