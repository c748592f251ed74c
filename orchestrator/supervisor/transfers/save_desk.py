"""Checkpoint tracker, the only writer of the ledger: enters what agents report, completes, verifies, keeps and prunes checkpoints.

Rules
- Changes are written to the ledger first; events and acknowledgements follow. On a full disk `news` waits, as the journal does.
- Where hosts do not see this disk, a checkpoint counts once it is complete in the job folder (`save_copies`).
- Nothing else waits: files are read, linked, moved and deleted in a thread.
- Files that a script overwrites or deletes before its next checkpoint is complete stay in `.kept/NUMBER` until then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from orchestrator.backends.api import BulkCopier, Wake
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.brain.model.rank_facts import RankState
from orchestrator.core.checkpoints import disk, steps
from orchestrator.core.checkpoints.choice import Pin, choose, expendable
from orchestrator.core.checkpoints.ledger import Ledger
from orchestrator.core.checkpoints.save import Closing, Place, Save, SaveState
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire import reports
from orchestrator.supervisor.transfers import closing, save_copies, save_disk
from orchestrator.supervisor.transfers.beginnings import Beginnings

UNSURE_S = 5.0
"""The pause before a file that cannot be read is tried again."""

SYNCED_MAX = 300
"""How many of the latest checkpoints a new supervisor reports to the brain."""


class SaveDesk:
    """All checkpoints of one job."""

    def __init__(self, job: JobDir, plan: Plan, copier: BulkCopier | None, wake: Wake) -> None:
        """`wake` is called, from any thread, when `news` has something. Raises OSError."""
        self._job = job
        self._keep, self._keep_every = plan.checkpoint_keep, plan.checkpoint_keep_every
        self._ledger = Ledger(job.root, job.ledger)
        self._watches: dict[int, closing.Watch] = {}
        self.notes: list[str] = [*self._ledger.faults]
        self._thread = save_disk.DiskThread(wake)
        self._homes = save_disk.Homes(job, plan)
        self._keeper = save_disk.Keeper(self._homes, job.checkpoints / disk.KEPT, self._thread, self.notes)
        self._stays: set[int] = set()
        self._copied = frozenset[tuple[str, int, int]]()  # the files of the last copied open checkpoint
        self._stuck: set[tuple[int, str]] = set()  # nodes with a rank that will not continue, by attempt
        self._beats: dict[str, closing.Beats] = {}
        self._gang = closing.Gang(0, 0, 0, ())
        self._pin: Pin | None = None
        # A comparison whose files could not be read, and when to try again
        self._again: tuple[float, d.CompareSave] | None = None
        self._events: list[e.Event] = []
        self.deep = False
        # Whether a node does not see this disk
        self.ships: Callable[[str], bool] = lambda node: True
        far = copier if plan.ssh is not None else None
        self.copies = save_copies.SaveCopies(job, far, self._homes.named, plan.checkpoint_glob)
        self._beginnings = Beginnings()

    @property
    def saves(self) -> dict[int, Save]:
        return self._ledger.saves

    # What happens

    def begin(self, facts: Facts, at: float) -> None:
        """Continue from an earlier supervisor: report to the brain what the ledger has and the brain does not know."""
        if facts.attempt is not None:
            ended = [rank for rank in facts.ranks.values() if rank.rank_state is RankState.EXITED]
            self._stuck = {(facts.attempt.number, rank.node) for rank in ended if not rank.ended_well}
        for number, known in facts.saves.items():
            if number not in self.saves:
                why = "it is no longer in the ledger"
                gone = dataclasses.replace(known, state=SaveState.GONE, why=why)
                self._events.append(e.SaveChanged(at, gone))
        self.mirror(facts)
        for save in sorted(self.saves.values(), key=lambda save: save.number)[-SYNCED_MAX:]:
            if facts.saves.get(save.number) != closing.brief(save):
                self._events.append(e.SaveChanged(at, closing.brief(save)))
            if save.state is SaveState.OPEN:
                watch = self._watches[save.number] = closing.Watch()
                if save.parts:
                    watch.changed(save, {})
            if save.is_coming and self._homes.are_copied(save):
                self.copies.fetch(save)

    def seen(self, at: float, node: str, report: reports.SaveSeen, gang: closing.Gang) -> None:
        """Enter what an agent reports of a checkpoint of the current attempt."""
        self._gang = gang
        unfit = save_copies.unfit_names(report)
        if report.attempt != gang.attempt or unfit:
            self.notes += [f"{node} reports a checkpoint that is refused: {unfit}"] if unfit else []
            return
        part = dataclasses.replace(report.part, host=node)
        self._give_up_rewritten(at, report)
        save = before = self._entry(report, gang)
        # Where nodes share this disk, an agent reports the files of all
        others = closing.parts_of(save) if self._is_far(save, node) else ()
        parts = (*(old for old in others if old.host != node), part)
        pieces = {name: piece for name, (_, piece) in closing.pieces_of(parts).items()}
        save = dataclasses.replace(
            save, state=SaveState.OPEN, closed_by=Closing.NONE, parts=parts, main=min(save.main, report.main),
            pieces=tuple(pieces.values()), steps=min(part.steps for part in parts), is_coming=False,
            is_new=all(part.is_new for part in parts),
        )  # fmt: skip
        is_known = save.number in self.saves and (before.state, before.is_coming) == (SaveState.OPEN, False)
        if before.is_coming:
            self.copies.forget(save.number)
        self._ledger.put(save)
        beats = {node: own for node, own in self._beats.items() if own.latest.attempt == gang.attempt}
        self._watches.setdefault(save.number, closing.Watch()).changed(save, beats)
        if not is_known:
            self._tell(at, save)
        for number in list(self._watches):  # also those that this one follows
            self._judge(at, number, gang)

    def read(self, at: float, node: str, report: reports.CheckpointsRead, gang: closing.Gang) -> None:
        """Enter what the ranks of a node had read before their first steps, which may show the checkpoint they resumed from."""
        began = self._beginnings.learn(node, report, gang, self.saves.values(), self._newest())
        if began is not None and report.attempt == gang.attempt:
            self._events.append(e.CheckpointRead(at, gang.attempt, began.save, began.other))
            note = functools.partial(self._beginnings.stated.__setitem__, gang.attempt)
            self._thread.later(lambda: self._homes.stated_step(began.other), lambda _, step: note(step))

    def hashed(self, at: float, node: str, report: reports.SaveHashed) -> None:
        """Enter the sha256 of a checkpoint's files, where they are still those."""
        digests = {piece.stamp: piece.sha256 for piece in report.pieces}
        for save in self._of(report.key, report.attempt):
            if (known := closing.with_digests(save, digests)) != save:
                self._ledger.put(known)
                if known.is_coming and known.is_hashed:
                    self.copies.fetch(known)

    def beat(self, at: float, node: str, heartbeat: reports.Heartbeat, gang: closing.Gang) -> None:
        """Enter a heartbeat, which may show that its node has continued."""
        if heartbeat.attempt != gang.attempt:
            return
        self._gang = gang
        if (gang.attempt, node) in self._stuck:
            return
        self._beats.setdefault(node, closing.Beats(heartbeat)).add(heartbeat)
        for number, watch in list(self._watches.items()):
            if watch.beat(node, heartbeat):
                self._judge(at, number, gang)

    def learn(self, event: e.FromNode) -> None:
        """Note a rank that will not continue; one that ended by itself with code 0 counts as continued. Distrust checkpoints on a
        disk that this machine does not see, where another host that is to resume from one lacks it: they share no disk."""
        match event.report:
            case reports.Exited() as exited if exited.code != 0 or exited.ordered:
                self._stuck.add((exited.attempt, event.node))
                self._beats.pop(event.node, None)
            case reports.PrepareFailed() as failed if (lost := self.unseen(failed.save)) is not None:
                for save in save_disk.out_of_sight(self.saves.values(), lost, event.node):
                    self._enter(event.at, save)

    def over(self, at: float, gang: closing.Gang) -> None:
        """Assess open checkpoints after a node has stopped the attempt, or was lost with it."""
        self._gang = gang
        for number in list(self._watches):
            self._judge(at, number, gang)
        if gang.is_over:
            self.copies.fetch_unhashed(self.saves.values(), gang.attempt)

    def mirror(self, facts: Facts) -> None:
        """Enter the brain's decisions about checkpoints."""
        self._pin = facts.pin
        for number, known in facts.saves.items():
            save = self.saves.get(number)
            if save is not None and {save.state, known.state} == {SaveState.WHOLE, SaveState.DISTRUSTED}:
                self._ledger.put(dataclasses.replace(save, state=known.state, why=known.why))

    def compare(self, at: float, order: d.CompareSave) -> None:
        """Close all checkpoints of an attempt, and compare the one that the next attempt is to resume from; `SaveCompared` follows."""
        self._again = None
        gang = dataclasses.replace(self._gang, lost=frozenset(self._gang.nodes))
        for number in list(self._watches):
            self._judge(at, number, gang)
        self.copies.fetch_unhashed(self.saves.values(), gang.attempt)
        self.deep = order.deep
        save = None if self.unseen(order.save) else self.saves.get(order.save)
        known, kept, homes = list(self.saves.values()), self._keeper.place(order.save), self._homes
        self._thread.later(
            lambda: save_disk.before_attempt(homes, save, kept, known, order),
            lambda at, ready: self._compared(at, order, ready),
        )

    def end(self, at: float) -> None:
        """Delete kept copies at the end of the job, if the newest checkpoint is in its place."""
        if (save := self._newest()) is not None:
            self._keeper.end(save)

    def news(self, at: float) -> list[e.Event]:
        """Return the events since the last call, for the brain."""
        if self._again is not None and at >= self._again[0]:
            self.compare(at, self._again[1])
        self._thread.finish(at)
        for number, fault in self.copies.fetched():
            self._fetched(at, number, fault)
        self.notes += full_disk.wait_for(self._ledger.keep_up)
        events, self._events = self._events, []
        return events

    def unseen(self, number: int) -> Save | None:
        """Return a checkpoint if it is on a disk that hosts see and this machine does not: a host has to compare it."""
        save = self.saves.get(number)
        is_theirs = save is not None and self._homes.is_unseen(save)
        return save if is_theirs and not self._keeper.place(number).is_dir() else None

    def torn_on(self, node: str, attempt: int) -> tuple[Save, ...]:
        """Return the torn checkpoints of the attempt before this one, as they are on a host."""
        return save_disk.torn_on(self.saves.values(), node, attempt - 1, self._homes, len(self._gang.nodes))

    def close(self) -> None:
        """End the thread, once what it has begun is done."""
        self._thread.close()

    def _entry(self, report: reports.SaveSeen, gang: closing.Gang) -> Save:
        """Return the checkpoint that a report is about: one that is open, or a new one."""
        known = self._of(report.key, report.attempt)
        last = known[-1] if known else None
        is_open = last is not None and last.state is SaveState.OPEN and not last.is_coming
        if last is not None and (is_open or report.key != report.series):
            return last
        return closing.opened(self._ledger.next_number, report, gang.world_size)

    def _give_up_rewritten(self, at: float, report: reports.SaveSeen) -> None:
        """Give up checkpoints that a host has overwritten before they were hashed: they cannot be fetched any more."""
        for save in self._of(report.key, report.attempt) if report.key == report.series else ():
            if self.copies.is_lost(save, report.part):
                self._fetched(at, save.number, f"{save.main} was overwritten before it was hashed")

    def _is_far(self, save: Save, node: str) -> bool:
        return self._homes.are_copied(save) and self.ships(node)

    def _of(self, key: str, attempt: int) -> list[Save]:
        return [save for save in self.saves.values() if (save.key, save.attempt) == (key, attempt)]

    def _judge(self, at: float, number: int, gang: closing.Gang) -> None:
        save = self.saves[number]
        if save.state is not SaveState.OPEN or save.is_coming or not save.parts:
            self._watches.pop(number, None)
            return
        if save.attempt != gang.attempt:  # nothing more will be reported of it
            gang = closing.Gang(save.attempt, 0, save.world_size, ())
        found = closing.judge(save, self._watches[number], gang, self.saves.values())
        if found.state is SaveState.OPEN:
            self._ledger.put(dataclasses.replace(save, why=found.why))
            self._copy_proved(save, found, gang)
        else:
            self._close(at, save, found, gang)

    def _copy_proved(self, save: Save, found: closing.Found, gang: closing.Gang) -> None:
        """Copy a checkpoint whose format alone shows that it is complete, since its ranks may overwrite it; the copy counts."""
        (part, *others), place = save.parts, Place("", str(self._homes.of(save)))
        is_shown = part.closed_by is Closing.LAST_WORD and not found.why and not others
        if not is_shown or self._copied == save.stamps or self._is_far(save, part.host):
            return

        def then(at: float, is_kept: bool) -> None:
            now = self.saves[save.number]
            if is_kept and now.state is SaveState.OPEN and now.stamps == save.stamps:
                self._close(at, now, closing.Found(SaveState.WHOLE, part.closed_by, ""), gang)

        self._copied = save.stamps
        self._keeper.copy(dataclasses.replace(save, places=(place,)), then)

    def _close(self, at: float, save: Save, found: closing.Found, gang: closing.Gang) -> None:
        state, pieces, host = closing.merged(save), closing.pieces_of(save.parts), save.parts[0].host
        save = dataclasses.replace(
            save, state=found.state, closed_by=found.closed_by, why=found.why, is_damaged=found.is_damaged, format=state.format,
            content=state.content, fits_any_size=state.fits_any_size, stated=state.step, cites=state.cites,
            written_ns=max((piece.mtime_ns for _, piece in pieces.values()), default=0),
            pieces=tuple(piece for _, piece in pieces.values()), parts=(),
            places=closing.places(save.parts, self._homes.of(save), functools.partial(self._is_far, save)),
        )  # fmt: skip
        save = self._with_step(at, save, gang)
        is_far = any(place.host for place in save.places)
        if found.state is SaveState.WHOLE and is_far:
            save = dataclasses.replace(save, state=SaveState.OPEN, is_coming=True)
            if save.is_hashed:
                self.copies.fetch(save)
        elif found.state is SaveState.WHOLE and self._homes.is_unseen(save):
            save = dataclasses.replace(save, places=(*save.places, Place(host, save.places[0].root)))
        self._enter(at, save)
        self._watches.pop(save.number, None)

    def _with_step(self, at: float, save: Save, gang: closing.Gang) -> Save:
        """Return a checkpoint with the job's step, and note where its attempt truly began if it shows that."""
        others = [other for other in self.saves.values() if other.number != save.number]
        misstated, base = steps.is_misstated([*others, save]), gang.base_step
        read = self._beginnings.stated.get(save.attempt, 0)
        began = steps.beginning(save, base, others, misstated=misstated, read=read)
        if began is not None:
            self._events.append(e.BeganElsewhere(at, save.attempt, began, save.main, save.steps))
            for other in others:
                if other.attempt == save.attempt and other.step is not None and other.stated is None:
                    self._enter(at, dataclasses.replace(other, step=other.step - base + began))
            self._gang = dataclasses.replace(self._gang, base_step=began)
        step, source = steps.job_step(save, base if began is None else began, misstated=misstated)
        return dataclasses.replace(save, step=step, step_source=source)

    def _enter(self, at: float, save: Save) -> None:
        """Enter a checkpoint whose state has changed; a complete one may replace, keep and prune others."""
        is_new = save.state is SaveState.WHOLE and self.saves[save.number].state is not SaveState.WHOLE
        self._ledger.put(save)
        self._tell(at, save)
        if not is_new:
            return
        for other in list(self.saves.values()):
            if other.number == save.number or not save_copies.has_same(save, other):
                continue
            if other.state is SaveState.WHOLE and self._homes.has(other):
                why = f"was overwritten by checkpoint {save.number}"
            elif other.is_coming and other.number < save.number:
                self.copies.forget(other.number)
                why = save_copies.late(save.number)
            else:
                continue
            gone = dataclasses.replace(other, state=SaveState.GONE, why=why, is_coming=False)
            self._ledger.put(gone)
            self._tell(at, gone)
        newest = self._newest()
        is_far = any(place.host for place in save.places)
        if newest is not None and newest.number == save.number and not is_far:
            self._keeper.keep(save)
        self._prune()

    def _tell(self, at: float, save: Save) -> None:
        self._events.append(e.SaveChanged(at, closing.brief(save)))

    def _newest(self) -> Save | None:
        return choose(self.saves.values(), self._gang.world_size, self._pin).save

    def _prune(self) -> None:
        if self._keep is None:
            return
        for save in expendable(self.saves.values(), self._keep, self._keep_every, self._newest()):
            is_own = save.is_named or self._homes.owns(save)
            if save.number not in self._stays and is_own and self._homes.has(save):
                self._stays.add(save.number)
                delete = functools.partial(disk.delete, save, self._homes.of(save))
                self._thread.later(delete, functools.partial(self._pruned, save))

    def _pruned(self, save: Save, at: float, why: str) -> None:
        if why:
            self.notes.append(f"{save.main} was not deleted, though checkpoint.keep is {self._keep}: {why}")
            return
        known = self.saves[save.number]
        self._enter(at, dataclasses.replace(known, state=SaveState.PRUNED, why="checkpoint.keep"))
        self.copies.discard(save)

    def _compared(self, at: float, order: d.CompareSave, ready: save_disk.Ready) -> None:
        for number, moves in ready.moved.items():
            moved = ", ".join(f"{name} to {to}" for name, to in moves)
            torn = self.saves.get(number)  # none for `save_disk.BEGUN`
            if moved:
                self.notes.append(f"torn checkpoint ({torn.why if torn else 'no file yet'}): moved {moved}")
            if moved and torn:
                self._ledger.put(dataclasses.replace(torn, why=f"{torn.why}; moved {moved}", places=()))
        fault = ""
        if ready.comparison is not None and ready.comparison.is_unsure:
            self.notes.append(f"{ready.comparison.fault}: trying again in {UNSURE_S:g} s")
            self._again = (at + UNSURE_S, order)
            return
        if ready.comparison is not None:
            save, fault = self.saves[order.save], ready.comparison.fault
            if fault:
                save = dataclasses.replace(save, state=SaveState.GONE, why=fault)
            else:
                pieces, by = ready.comparison.pieces, ready.comparison.by
                save = dataclasses.replace(save, pieces=pieces, compared=by, places=ready.places)
            if closing.brief(save) != closing.brief(self.saves[order.save]):
                self._tell(at, save)
            self._ledger.put(save)
        self._events.append(e.SaveCompared(at, order.attempt, order.save, fault))

    def _fetched(self, at: float, number: int, fault: str) -> None:
        """Enter that a checkpoint was fetched, or could not be."""
        save = self.saves[number]
        if not save.is_coming:
            return
        if fault:
            self.notes.append(f"checkpoint {save.main} of attempt {save.attempt} was not copied: {fault}")
            self._enter(at, dataclasses.replace(save, state=SaveState.GONE, why=fault, is_coming=False))
        else:
            home = (Place("", str(self._homes.of(save))), *(place for place in save.places if place.host))
            self._enter(at, dataclasses.replace(save, state=SaveState.WHOLE, places=home, is_coming=False))
