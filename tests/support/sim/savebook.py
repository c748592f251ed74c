"""Which save may an attempt begin from? The books and oracles of saves.

Written from the contract: they know the journal, the ledger on the disk and which bytes truly lie there, and nothing of the
facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.observations import Failure
from orchestrator.core.wire import reports

from .night import Naming
from .tries import Try

if TYPE_CHECKING:
    from .ledger import Ledger
    from .world import World

PASSED_MAX = 20
"""So many saves that were passed over are named."""

OWN_KINDS = (d.VerdictKind.CRASH, d.VerdictKind.OOM)
"""How ranks end that cannot load a save."""

LATE_STEPS = 10
"""So many steps before a loss that is not finite may be given up: a loss is told some seconds late."""


class SaveBook:
    """What is known of the saves of one night."""

    def __init__(self, ledger: Ledger, world: World) -> None:
        self.ledger = ledger
        self.world = world
        self.named = self.named_after = 0  # the save that a person has named, and the last attempt before that
        self.named_before: list[tuple[int, int]] = []
        self.asked: d.CompareCheckpoint | None = None  # the comparison under way
        self.proved: tuple[int, int] | None = None  # after which attempt which save was found whole
        self.given_up: dict[int, bool] = {}  # and whether an attempt has got further since
        self.loading: dict[int, str] = {}  # what ranks of the present attempt were loading when they died
        self.not_whole: set[int] = set()  # saves that are not whole on a node of the present attempt

    def _must(self, holds: bool, what: str) -> None:
        self.ledger.must(holds, what)

    @property
    def bears_its_step(self) -> bool:
        """Tell whether a save tells its own step."""
        night = self.world.night
        return night.states or night.naming in (Naming.ITS_OWN, Naming.STEP)

    # The contract

    def newest(self, without: int = 0) -> Checkpoint | None:
        """Return the whole save that counts: the last of the latest attempt, unless an earlier attempt got further; after
        a person has named one, that one and what later attempts wrote."""
        last: dict[int, Checkpoint] = {}
        for save in self._known():
            is_named = save.number == self.named and save.state is CheckpointState.DISTRUSTED
            if (save.state is CheckpointState.WHOLE or is_named) and save.number != without:
                last[save.attempt] = max(save, last.get(save.attempt, save), key=lambda one: one.number)
        later = {attempt: save for attempt, save in last.items() if save.number != self.named}
        return max((later or last).values(), key=lambda save: (save.step or 0, save.attempt), default=None)

    def has_none(self) -> bool:
        """Tell whether no attempt may follow: the newest save is for another number of ranks, or the one that a person has
        named is lost."""
        save, size = self.newest(), self.world.nodes * self.world.night.ranks
        if save is None:
            return bool(self.named)
        return self.world.night.sharded and save.world_size != size

    def _known(self) -> list[Checkpoint]:
        saves = self.world.save_desk.saves.values()
        return [
            save for save in saves if not self.named or save.number == self.named or save.attempt > self.named_after
        ]

    # The journal

    def written(self, news: News) -> None:
        """Judge a line of the journal as far as saves go, and enter it."""
        match news:
            case e.SupervisorStarted():
                self.asked = self.proved = None
            case e.FromNode(report=reports.Exited(attempt=number, rank=rank, failure=Failure() as failure)) if (
                number == len(self.ledger.tries)
            ):
                self.loading.setdefault(rank, failure.loading)
            case e.FromNode(report=reports.PrepareFailed(attempt=number, save=save)) if save and number == len(
                self.ledger.tries
            ):
                self.not_whole.add(save)
            case d.CompareCheckpoint():
                self._asks(news)
            case e.CheckpointCompared():
                asked = self.asked
                if asked is not None and (news.attempt, news.save) == (asked.attempt, asked.save):
                    self.asked = None
                    self.proved = None if news.fault else (news.attempt, news.save)
            case d.DistrustCheckpoint():
                self._distrusts(news)
            case _:
                pass

    def _asks(self, order: d.CompareCheckpoint) -> None:
        """What is compared is what the next attempt would begin from; all of its bytes where they may have suffered."""
        newest, last = self.newest(), self.ledger.tries[-1]
        self._must(self.asked is None, f"one is being compared: {order}")
        self._must(order.save == (newest.number if newest else 0), f"newest is {newest}: {order}")
        lost = last.verdict is not None and last.verdict.kind is d.VerdictKind.NODE_LOST
        resumed = self.ledger.forgiven == len(self.ledger.tries)
        self._must(order.deep or not (lost or resumed), f"all bytes are to be compared: {order}")
        self.asked, self.proved = order, None

    def _distrusts(self, decision: d.DistrustCheckpoint) -> None:
        """Only a save that could not be loaded is given up, and only for another one from which an attempt follows."""
        last = self.ledger.tries[-1]
        self._must(self._begun(last) == decision.save, f"{last.begun}: {decision}")
        self._must(self._made(last) == 0, f"it was loaded: {decision}")
        self._must(last.verdict is not None and last.verdict.retry, f"nothing is to follow: {decision}")
        self._must(self.newest(without=decision.save) is not None, f"there is no other: {decision}")
        known = self._is_said(last) if decision.is_certain else self._is_alike(last)
        self._must(known, f"nothing shows that: {decision}")
        self.given_up[decision.save] = False

    def _begun(self, attempt: Try) -> int:
        return attempt.begun.resume.save if attempt.begun.resume is not None else 0

    def _made(self, attempt: Try) -> int:
        return self.world.journal_high(attempt.number)

    def _is_said(self, attempt: Try) -> bool:
        """Tell whether a rank that is to blame died while it loaded the save itself, or a node does not have it whole."""
        resume, verdict = attempt.begun.resume, attempt.verdict
        if resume is None or verdict is None:
            return False
        named = any(self.loading.get(rank) == resume.path for rank in verdict.ranks)
        is_named = named and verdict.kind is d.VerdictKind.CRASH
        return is_named or (resume.save in self.not_whole and verdict.kind is d.VerdictKind.LAUNCH)

    def _is_alike(self, attempt: Try) -> bool:
        """Tell whether an attempt and the one before it ended alike, from one save, before any step."""
        before = self.ledger.tries[self.ledger.forgiven : -1][-1:]
        return any(
            one.verdict is not None
            and attempt.verdict is not None
            and one.verdict.signature == attempt.verdict.signature
            and self._begun(one) == self._begun(attempt) != 0
            and self._made(one) == self._made(attempt) == 0
            for one in before
        )

    # What follows

    def begins(self, decision: d.BeginAttempt) -> None:
        """No attempt begins from a save that was not proved whole since the last one ended, or that is not the newest."""
        save = self.newest()
        self._must(not self.has_none(), f"{save or self.named} cannot be begun from: {decision}")
        wanted = ResumePoint(save.path, save.step, save.number) if save is not None else None
        self._must(decision.resume == wanted, f"from {decision.resume}, newest is {wanted}")
        number = save.number if save is not None else 0
        if self.ledger.tries:
            proof = (self.ledger.tries[-1].number, number)
            self._must(self.proved == proof, f"{proof} is not proved, but {self.proved}: {decision}")
            self._could_load(self.ledger.tries[-1])
            is_next = len(self.ledger.tries) - self.ledger.forgiven > 1 and "is not used again" not in decision.why
            self._must(not (is_next and self._is_the_code()), f"the code loads no save: {decision}")
        if save is not None:
            self._must(self.world.save_desk.is_intact(save), f"its bytes are not those of the ledger: {decision}")
            self._must(number == self.named or number not in self.given_up, f"it was given up: {decision}")
        self._passes(decision, save)
        self._distrusted()
        self.proved, self.loading, self.not_whole = None, {}, set()

    def _could_load(self, last: Try) -> None:
        """What a rank could not load is given up, if there is another one."""
        save = self._begun(last)
        is_over = self.ledger.forgiven == len(self.ledger.tries)
        if self._is_said(last) and not self._made(last) and not is_over and save not in self.given_up:
            others = self.newest(without=save)
            self._must(others is None or save == self.named, f"save {save} could not be loaded, and is trusted")

    def _passes(self, decision: d.BeginAttempt, save: Checkpoint | None) -> None:
        """Every newer save that was not chosen is named, up to the newest whole one of an attempt that got less far."""
        place = (save.attempt, save.number) if save is not None else (0, 0)
        newer = [one for one in self._known() if (one.attempt, one.number) > place]
        newer.sort(key=lambda one: (one.attempt, one.number), reverse=True)
        whole = [index for index, one in enumerate(newer) if one.state is CheckpointState.WHOLE]
        wanted = [one.number for one in newer[: whole[0] + 1 if whole else None]]
        told = [one.save for one in decision.passed_over]
        self._must(told[: len(wanted)] == wanted[:PASSED_MAX], f"passed over were {wanted}: {decision}")
        self._must(set(told) <= {one.number for one in newer}, f"they are not newer: {decision}")

    def _distrusted(self) -> None:
        """What was written out of step is given up, and nothing else but what was told."""
        for save in self.world.save_desk.saves.values():
            is_odd = self.ledger.desyncs.is_out_of_step(save)
            is_given_up = save.number in self.given_up and save.state is CheckpointState.WHOLE
            self._must(not is_given_up, f"it was given up, and another has helped: {save}")
            self._must(not is_odd or save.state is not CheckpointState.WHOLE, f"it was out of step: {save}")
            if save.state is CheckpointState.DISTRUSTED and save.number not in self.given_up:
                is_unsound = (
                    self.ledger.notices.has_diverged
                    and (save.step or 0) > self.ledger.world.night.odd_loss[0] - LATE_STEPS
                )
                self._must(is_odd or is_unsound or save.number == self.named, f"for no reason: {save}")

    def resumed(self, news: e.ResumeRequested) -> None:
        """A person has named a save, or wants the newest: where a later attempt has passed the one that was named before,
        what it left behind does not count any more."""
        while self.named and ((newest := self.newest()) is None or newest.attempt <= self.named_after):
            self.named, self.named_after = self.named_before.pop()
        if news.save:
            self.named_before.append((self.named, self.named_after))
            self.named, self.named_after = news.save, len(self.ledger.tries)

    def got_on(self) -> None:
        """The last attempt came further than all before it: what was given up by then was the cause."""
        self.given_up = dict.fromkeys(self.given_up, True)

    def ends(self, decision: d.EndJob) -> None:
        """A job is not given up while another save may help; if it does not succeed, what no attempt has got further without
        is trusted again."""
        self.asked = None
        self._distrusted()
        if decision.end is d.JobEnd.SUCCEEDED or not self.ledger.tries:
            return
        if decision.end is d.JobEnd.FAILED and self._cannot_begin():
            others = self.newest(without=self._begun(self.ledger.tries[-1]))
            self._must(others is None or self._is_the_code(), f"{others} was not tried: {decision}")
        self.given_up = {save: sure for save, sure in self.given_up.items() if sure}

    def _is_the_code(self) -> bool:
        """Tell whether the last two attempts have raised the same at one line, from two saves, and neither got any further."""
        last = self.ledger.tries[self.ledger.forgiven :][-2:]
        signatures = {one.verdict.signature if one.verdict is not None else None for one in last}
        signature = signatures.pop()
        is_raised = signature is not None and signature.cause is d.FailureCause.EXCEPTION and signature.frames
        begun = {self._begun(one) for one in last}
        is_alike = not signatures and bool(is_raised) and len(begun) == 2 and 0 not in begun
        return is_alike and not any(map(self._made, last)) and not any(self._has_saved(one) for one in last)

    def _has_saved(self, attempt: Try) -> bool:
        return any(save.attempt == attempt.number for save in self.world.save_desk.saves.values())

    def _cannot_begin(self) -> bool:
        """Tell whether the job makes no progress since ranks fail before their first step from a save that nobody has
        named."""
        last, verdict = self.ledger.tries[-1], self.ledger.tries[-1].verdict
        is_own = verdict is not None and verdict.signature.kind in OWN_KINDS
        is_stuck = verdict is not None and verdict.kind is d.VerdictKind.NO_PROGRESS
        made = any(map(self._made, self.ledger.tries[-2:]))
        return is_own and is_stuck and not made and self._begun(last) not in (0, self.named)
