"""Who has run other collectives than its peers, and may be started from what? The oracles of desyncs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core.checkpoints.checkpoint import Checkpoint
from orchestrator.core.wire import reports

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
        self.guilty: dict[int, int] = {}  # attempts that were judged, and since which of their own steps
        self.said = False
        self._begin()

    def _begin(self) -> None:
        self.told: dict[int, set[int]] = {}  # who has told of a step
        self.beat_s: dict[int, float] = {}
        self.due_s: float | None = None
        self.unsure = False

    def heard(self, beat: reports.Heartbeat) -> None:
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
            case d.NextCall():
                self._begin()
            case d.BeginAttempt():
                self._begin()
                self.said = False
                self._begins(news)
            case (
                d.Notice(verdict=d.Verdict(kind=d.VerdictKind.DESYNC) as verdict)
                | d.Judge(verdict=d.Verdict(kind=d.VerdictKind.DESYNC) as verdict)
            ):
                self._judge(verdict)
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
        own = (verdict.step or 0) - (gang.base if gang.call else self.ledger.tries[-1].base)
        must(
            bool(equal) and equal[-1] < own <= unequal[0],
            f"it began in {equal[-1:]} to {unequal[:1]}: {verdict}",
        )

    def _begins(self, decision: d.BeginAttempt) -> None:
        """Nothing starts from what an attempt has written since it was out of step, unless a person has named it."""
        world, resume = self.ledger.world, decision.resume
        if resume is None or resume.save == self.ledger.saves.named:
            return
        written = world.files.held.get(world.save_desk.versions[resume.save])
        is_odd = written is not None and written.is_odd and written.attempt in self.guilty
        self.ledger.must(not is_odd, f"{written} was out of step: {decision}")

    def judged(self, attempt: Try) -> None:
        """Enter an attempt that was judged to be out of step."""
        verdict = attempt.verdict
        if verdict is not None and verdict.kind is d.VerdictKind.DESYNC:
            self.guilty[attempt.number] = (verdict.step or 0) - attempt.base

    def is_out_of_step(self, save: Checkpoint) -> bool:
        """Tell whether an attempt wrote it after it was out of step, as far as can be known."""
        if save.attempt not in self.guilty:
            return False
        base, began = self.ledger.tries[save.attempt - 1].base, self.guilty[save.attempt]
        off = 0 if self.ledger.saves.bears_its_step else NEAR_STEPS
        return (save.step or 0) >= base + began - off

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
