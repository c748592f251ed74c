"""Who has run other collectives than its peers, and may be started from what? The oracles of desyncs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News

from .night import Naming
from .tries import Try

if TYPE_CHECKING:
    from .gang import Gang
    from .ledger import Ledger

JUDGED_S_MAX = 10.0
"""From the third step after which counts are known to differ to the verdict."""

AGREED_MIN = 3
DIFFER_MIN = 3
STEPS_MAX = 32
"""So many steps back it may be known that counts agreed."""

BEAT_S_MAX = 5.0
"""Where beats come with longer pauses, or the gang stands still, nothing is promised."""

NEAR_STEPS = 2
"""By so much may be off what is known of a checkpoint's step where its name does not bear it."""


class DesyncBook:
    """What one supervisor has heard of the present attempt."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.guilty: set[int] = set()  # attempts that were judged
        self.began = 0  # as the verdict on the present attempt says, in steps of its own
        self.said = False
        self._begin()

    def _begin(self) -> None:
        self.told: dict[int, set[int]] = {}  # who has told of a step
        self.beat_s: dict[int, float] = {}
        self.due_s: float | None = None
        self.unsure = False

    def heard(self, beat: e.Heartbeat) -> None:
        gang = self._gang()
        if gang is None or beat.attempt != gang.attempt:
            return
        now_s = self.ledger.world.now
        for one in beat.ranks:
            self.unsure = self.unsure or now_s - self.beat_s.get(one.rank, now_s) > BEAT_S_MAX
            self.beat_s[one.rank] = now_s
            for mark in one.collective_counts:
                self.told.setdefault(mark.optimizer_step, set()).add(one.rank)
        for step in sorted(self.told)[:-STEPS_MAX]:
            del self.told[step]
        equal, unequal = self._split(gang)
        if self.due_s is None and len(equal) >= AGREED_MIN and len(unequal) >= DIFFER_MIN:
            self.due_s = now_s + JUDGED_S_MAX

    def looked(self, decisions: list[d.Decision]) -> None:
        """A desync is judged in time, if nothing else comes between."""
        gang = self._gang()
        if gang is None or self.due_s is None or decisions:
            return
        self.unsure = self.unsure or gang.is_stuck or not gang.stepping
        unsure = self.unsure or self.ledger.world.night.sends
        late = self.ledger.world.now > self.due_s and not unsure and not self.said
        self.ledger.must(not late, f"ranks {_odd(gang)} are out of step, and nothing is said")

    def written(self, news: News) -> None:
        match news:
            case e.SupervisorStarted():
                self._begin()
            case d.BeginAttempt():
                self._begin()
                self.began, self.said = 0, False
                wrote = self.ledger.world.tainted.get(news.resume.path if news.resume else "")
                self.ledger.must(wrote not in self.guilty, f"attempt {wrote} was out of step: {news}")
            case d.Alert() | d.Judge() if news.verdict.kind is d.Kind.DESYNC:
                self._judge(news.verdict)
                self.said = True
            case d.Judge() | d.Finish():
                self.unsure = True  # it is over
            case _:
                pass

    def _judge(self, verdict: d.Verdict) -> None:
        """Whoever is called out of step is, and since then; and it is said once."""
        gang, must = self._gang(), self.ledger.must
        assert gang is not None
        odd = _odd(gang)
        must(bool(odd), f"no rank is out of step: {verdict}")
        must(not self.said, f"it is said again: {verdict}")
        if self.due_s is None:  # a group that all its ranks have told of may be a part of the gang
            silent = self.unsure or len(self.beat_s) < gang.size
            must(silent, f"not for so many steps have counts differed: {verdict}")
            return
        told = verdict.ranks if gang.size > 2 or gang.ranks[odd[0]].counted.odd < 0 else odd
        must(tuple(told) == tuple(odd), f"ranks {odd} are out of step: {verdict}")
        equal, unequal = self._split(gang)
        own = (verdict.step or 0) - self.ledger.tries[-1].base
        must(
            bool(equal) and equal[-1] < own <= unequal[0],
            f"it began in {equal[-1:]} to {unequal[:1]}: {verdict}",
        )

    def judged(self, attempt: Try) -> None:
        """Nothing starts from what the attempt has written since it was out of step."""
        verdict, ledger = attempt.verdict, self.ledger
        if verdict is None or verdict.kind is not d.Kind.DESYNC:
            return
        self.guilty.add(attempt.number)
        self.began = (verdict.step or 0) - attempt.base
        for one in [*ledger.older, *([ledger.checkpoint] if ledger.checkpoint else [])]:
            if self.is_out_of_step(one.path, one.step or 0):
                ledger.drop(one.path)
        newest = (ledger.checkpoint.step or 0) if ledger.checkpoint else 0
        attempt.saved = newest > attempt.base

    def is_out_of_step(self, path: str, step: int) -> bool:
        """Tell whether the present attempt wrote it after it was out of step, as far as can be known."""
        attempt, world = self.ledger.tries[-1], self.ledger.world
        if attempt.number not in self.guilty or path not in attempt.wrote:
            return False
        bears_its_step = world.night.naming in (Naming.ITS_OWN, Naming.STEP) and world.saved[path] == step
        return step >= attempt.base + self.began - (0 if bears_its_step else NEAR_STEPS)

    def _gang(self) -> Gang | None:
        tries = self.ledger.tries
        return self.ledger.world.gangs.get(tries[-1].number) if tries else None

    def _split(self, gang: Gang) -> tuple[list[int], list[int]]:
        """Return the steps that all ranks have told of: those before one was out of step, and those since."""
        whole = [step for step in sorted(self.told) if len(self.told[step]) == gang.size]
        odd = _odd(gang)
        since = gang.ranks[odd[0]].counted.since if odd and gang.size > 1 else float("inf")
        return [step for step in whole if step < since], [step for step in whole if step >= since]


def _odd(gang: Gang) -> list[int]:
    return [number for number, rank in gang.ranks.items() if rank.counted.odd]
