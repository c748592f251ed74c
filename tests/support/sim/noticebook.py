"""Who trains alone, whose loss is not finite, who ends well behind a traceback; and is that said when it is so, once, and
never when it is not? The oracle of notices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core.observations import Failure
from orchestrator.core.wire import reports

if TYPE_CHECKING:
    from .ledger import Ledger

ALONE_STEPS = 30
"""After so many steps of each rank it is said."""

SAID_S_MAX = 1.0

LOSSES_MIN = 2
"""So many losses in a row that are not finite are no step that a scaler skips."""


class NoticeBook:
    """What the ranks of the present attempt have told, and what was said of it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.has_diverged = False
        self._begin()

    def _begin(self) -> None:
        self.steps: dict[int, int] = {}  # of ranks whose last word is that they are alone
        self.said = self.withdrawn = 0
        self.due_s: float | None = None
        self.losses: dict[int, float] = {}  # of each rank the last
        self.losses_said = self.losses_withdrawn = 0
        self.loss_due_s: float | None = None
        self.sums: dict[int, dict[int, int]] = {}  # by step of each rank
        self.drift_said = 0
        self.drift_due_s: float | None = None
        self.diverged_s: float | None = None  # since when two losses in a row of a rank were not finite
        self.caught: set[int] = set()  # they ended well behind a traceback
        self.ends_said = 0
        self.full: set[str] = set()  # nodes without room for checkpoints in memory
        self.full_said = 0

    def heard(self, beat: reports.Heartbeat) -> None:
        tries = self.ledger.tries
        if not tries or beat.attempt != tries[-1].number:
            return
        for one in beat.ranks:
            if one.alone is None:
                self.steps.pop(one.rank, None)
            else:
                self.steps[one.rank] = one.steps
            if one.training is not None and one.training.loss is not None:
                self.losses[one.rank] = one.training.loss
            if one.nonfinite_losses >= LOSSES_MIN and self.diverged_s is None:
                self.diverged_s = self.ledger.world.now
            for _, step, _, total in one.parameter_sums:
                self.sums.setdefault(step, {})[one.rank] = total
        if self.drift_due_s is None and (self._has_drifted() or self._are_shards()):
            self.drift_due_s = self.ledger.world.now + SAID_S_MAX
        if self._is_loss_odd() == (self.losses_said > self.losses_withdrawn):
            self.loss_due_s = None
        elif self.loss_due_s is None:
            self.loss_due_s = self.ledger.world.now + SAID_S_MAX
        if not self._are_alone(ALONE_STEPS):
            self.due_s = None
        elif self.due_s is None:
            self.due_s = self.ledger.world.now + SAID_S_MAX

    def _compared(self) -> list[list[int]]:
        """Return the sums of the steps that all ranks have told, step by step."""
        gang = self.ledger.world.gangs.get(self.ledger.tries[-1].number)
        size = gang.size if gang is not None else 0
        return [list(of.values()) for _, of in sorted(self.sums.items()) if len(of) == size > 1]

    def _has_drifted(self) -> bool:
        """Tell whether all ranks agreed at two steps, and one differs at a later one."""
        equal = [len(set(sums)) == 1 for sums in self._compared()]
        return equal[:2] == [True, True] and not all(equal)

    def _are_shards(self) -> bool:
        return sum(len(set(sums)) == len(sums) for sums in self._compared()) > 2

    def _are_alone(self, steps: int) -> bool:
        gang = self.ledger.world.gangs.get(self.ledger.tries[-1].number)
        return gang is not None and 1 < gang.size == sum(one >= steps for one in self.steps.values())

    def looked(self, decisions: list[d.Decision]) -> None:
        """It is said in time, and taken back at once."""
        late = self.due_s is not None and self.ledger.world.now > self.due_s and not decisions
        self.ledger.must(
            not late or self.said > self.withdrawn or self._is_over(), "ranks are alone, and nothing is said"
        )
        wrong = self.said > self.withdrawn and not self._are_alone(1) and not decisions
        self.ledger.must(not wrong or self._is_over(), "ranks are no longer alone, and it is not taken back")

        late = self.drift_due_s is not None and self.ledger.world.now > self.drift_due_s and not decisions
        self.ledger.must(not late or self.drift_said == 1 or self._is_over(), "nothing is said of what ranks hold")

        acts = self.ledger.world.night.limits.on_nan != "notify"
        late = self.diverged_s is not None and self.ledger.world.now > self.diverged_s + SAID_S_MAX and not decisions
        self.ledger.must(not (acts and late) or self._is_over(), f"the loss stays {self.losses}, and nothing follows")

        late = self.loss_due_s is not None and self.ledger.world.now > self.loss_due_s and not decisions
        is_said = self.losses_said > self.losses_withdrawn
        self.ledger.must(
            not late or is_said == self._is_loss_odd() or self._is_over(),
            f"said of the loss {self.losses}: {is_said}",
        )

    def _is_loss_odd(self) -> bool:
        return bool(self.losses) and not math.isfinite(self.losses[min(self.losses)])

    def _is_over(self) -> bool:
        return bool(self.ledger.tries and self.ledger.tries[-1].number == self.ledger.stopped) or self.ledger.cancelled

    def written(self, news: News) -> None:
        must = self.ledger.must
        match news:
            case d.BeginAttempt(resume=resume):
                self._begin()
                first = self.ledger.world.night.odd_loss[0]
                sound = not self.has_diverged or resume is None or (resume.step or 0) < first
                must(sound, f"the loss was infinite from step {first} on: {news}")
            case d.Judge(verdict=d.Verdict(kind=d.VerdictKind.DIVERGED) as verdict):
                on_nan = self.ledger.world.night.limits.on_nan
                must(on_nan != "notify" and self.diverged_s is not None, f"the losses are {self.losses}: {news}")
                must(verdict.retry == (on_nan == "rollback" and not self.has_diverged), f"again or not: {news}")
                self.has_diverged = True
            case d.Notice(topic=d.NoticeTopic.ALONE, withdrawn=False):
                self.said += 1
                must(self.said == 1, f"said again: {news}")
                ok = self.ledger.tries[-1].ok
                early = [rank for rank, steps in self.steps.items() if steps < ALONE_STEPS and rank not in ok]
                must(not early, f"ranks {early} may form their group yet: {news}")
                must(self._are_alone(1), f"not all ranks are alone, or that is not known: {self.steps}, {news}")
            case d.Notice(topic=d.NoticeTopic.ALONE):
                self.withdrawn += 1
                must(self.said == self.withdrawn == 1, f"nothing was said before: {news}")
                must(not self._are_alone(1), f"they still are alone: {news}")
            case d.Notice(topic=d.NoticeTopic.LOSS, withdrawn=withdrawn):
                self.losses_said, self.losses_withdrawn = (
                    self.losses_said + (not withdrawn),
                    self.losses_withdrawn + withdrawn,
                )
                is_said = self.losses_said > self.losses_withdrawn
                must(is_said == self._is_loss_odd() == (not withdrawn), f"the losses are {self.losses}: {news}")
            case d.Notice(topic=d.NoticeTopic.REPLICAS, why=why, key=key):
                self.drift_said += 1
                must(self.drift_said == 1, f"said again: {news}")
                must(self._are_shards() if key else self._has_drifted(), f"the sums are {self.sums}: {news}")
                must(bool(key) or f"rank {self.ledger.world.night.drift[0]} on" in why, f"it is another: {news}")
            case e.FromNode(report=reports.Exited(rank=rank, code=0, ordered=False, failure=Failure())):
                self.caught.add(rank)
            case d.Notice(topic=d.NoticeTopic.END):
                self.ends_said += 1
                must(
                    self.ends_said == 1 and bool(self.caught),
                    f"{self.caught} ended behind a traceback: {news}",
                )
            case e.FromNode(node=node, report=reports.Prepared(attempt=attempt, memory_fault=fault)):
                if fault and attempt == self.ledger.tries[-1].number:
                    self.full.add(node)
            case d.Notice(topic=d.NoticeTopic.MEMORY, why=why):
                self.full_said += 1
                must(self.full_said == 1 and bool(self.full), f"{self.full} have no room in memory: {news}")
                must(all(node in why for node in self.full), f"{self.full} have no room in memory: {news}")
            case d.Finish(ending=d.AttemptEnd.DONE):
                must(self.full_said == bool(self.full), f"{self.full} have no room in memory: {news}")
                must(self.ends_said == bool(self.caught), f"{self.caught} ended behind a traceback: {news}")
            case _:
                pass
