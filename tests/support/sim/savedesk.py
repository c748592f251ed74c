"""The virtual desk of saves, and the truth about their bytes. Both are on disks and outlive every supervisor.

The desk numbers saves, and computes steps and beginnings with the real pure functions of `core.checkpoints`, as the real
one does. What comes of files is chance here: `Files` has which bytes lie where, and only the world knows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.core.checkpoints import file_groups, steps
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointState,
    CompletionReason,
    Content,
    FileLocation,
    Format,
)

ROOT = "/ckpt"
"""The checkpoint place, on every disk."""

HERE = ""
"""The disk of the job folder, as places name it."""


@dataclass(frozen=True, slots=True)
class Written:
    """What bytes hold: the job's true step, of which attempt, and whether that was out of step by then."""

    attempt: int
    step: int
    is_odd: bool


@dataclass(slots=True)
class Files:
    """Which version of bytes lies at each name of each host's disk. `held`: what a version holds; none for garbage."""

    disk: dict[tuple[str, str], int] = field(default_factory=dict)
    held: dict[int, Written] = field(default_factory=dict)
    last: int = 0

    def write(self, host: str, path: str, written: Written | None) -> int:
        """Put other bytes at a name; return their version."""
        self.last += 1
        self.disk[host, path] = self.last
        if written is not None:
            self.held[self.last] = written
        return self.last

    def at(self, path: str, host: str = HERE) -> int:
        """Return the version at a name, 0 where there is no file."""
        return self.disk.get((host, path), 0)

    def step(self, version: int) -> int:
        """Return the job's true step that bytes hold, 0 where they hold none."""
        return self.held[version].step if version in self.held else 0


@dataclass(frozen=True, slots=True)
class Saved:
    """An agent's report of a save, which the journal never has. `count`: the attempt's own steps, as its time says."""

    at: float
    node: str
    attempt: int
    path: str
    count: int
    version: int
    is_torn: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """What the desk has to know of the current attempt."""

    number: int
    base_step: int
    world_size: int


@dataclass(slots=True)
class SaveDesk:
    """The ledger of one job. `versions`: the bytes that each save was entered for; `open`: those that are not closed yet;
    `travels`: saves lie on hosts, and have to come home."""

    files: Files
    travels: bool = False
    states: bool = False
    fits_any_size: bool = True
    saves: dict[int, Checkpoint] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    open: dict[int, Saved] = field(default_factory=dict)
    events: list[e.Event] = field(default_factory=list)

    # What happens

    def begin(self, at: float, facts: Facts) -> None:
        """Tell a new supervisor's brain what it does not know."""
        self.mirror(facts)
        for save in list(self.saves.values()):
            if facts.checkpoints.get(save.number) != save:
                self._tell(at, save)

    def mirror(self, facts: Facts) -> None:
        """Enter which saves the brain has given up, and which it trusts again."""
        for number, known in facts.checkpoints.items():
            save = self.saves.get(number)
            states = {known.state, save.state} if save is not None else set()
            if save is not None and states == {CheckpointState.WHOLE, CheckpointState.DISTRUSTED}:
                self.saves[number] = dataclasses.replace(save, state=known.state, why=known.why)

    def seen(self, at: float, report: Saved, attempt: Attempt, *, closes: bool) -> Checkpoint | None:
        """Enter a save of the current attempt; `closes`: every rank has gone on since. What others report is not entered."""
        if report.attempt != attempt.number:
            return None
        save = self._entry(report, attempt.world_size)
        before = self.saves.get(save.number)
        is_known = before is not None and (before.state, before.is_in_transit) == (
            CheckpointState.OPEN,
            False,
        )
        self.saves[save.number], self.versions[save.number] = save, report.version
        self.open[save.number] = report
        if closes or report.is_torn:
            self.close(at, save.number, attempt, is_whole=not report.is_torn, by=CompletionReason.STEPS)
        elif not is_known:
            self._tell(at, save)
        return self.saves[save.number]

    def close(self, at: float, number: int, attempt: Attempt, *, is_whole: bool, by: CompletionReason) -> None:
        """Close the book on a save that is open."""
        report, save = self.open.pop(number), self.saves[number]
        stated = self.files.step(report.version) if self.states else file_groups.find_step(report.path)
        host = report.node if self.travels else HERE
        save = dataclasses.replace(save, stated=stated, locations=(FileLocation(host, ROOT),), why="", closed_by=by)
        save = self._with_step(at, save, attempt)
        if not is_whole:
            why = "the attempt ended while it was written"
            save = dataclasses.replace(save, state=CheckpointState.TORN, why=why, closed_by=CompletionReason.NONE)
        elif self.travels:
            save = dataclasses.replace(save, is_in_transit=True)
        else:
            save = dataclasses.replace(save, state=CheckpointState.WHOLE)
        self._enter(at, save)

    def fetched(self, at: float, number: int, fault: str) -> None:
        """A save has come home, or cannot."""
        save = self.saves[number]
        host = save.locations[0].host
        if not fault and self.files.at(save.main, host) != self.versions[number]:
            fault = f"{save.main} was written again before it was copied"
        if fault:
            self._enter(at, dataclasses.replace(save, state=CheckpointState.GONE, why=fault, is_in_transit=False))
            return
        self.files.disk[HERE, save.main] = self.versions[number]
        places = (FileLocation(HERE, ROOT), *save.locations)
        self._enter(at, dataclasses.replace(save, state=CheckpointState.WHOLE, locations=places, is_in_transit=False))

    def compared(self, at: float, order: d.CompareCheckpoint) -> None:
        """Answer what the bytes of a save are, against those that it was entered for."""
        fault = ""
        if order.save:
            save, there = self.saves[order.save], self.files.at(self.saves[order.save].main)
            if there != self.versions[order.save]:
                fault = f"{save.main} {'has other bytes' if there else 'is gone'}"
                self._change(at, dataclasses.replace(save, state=CheckpointState.GONE, why=fault))
            else:
                self._change(at, dataclasses.replace(save, compared="sha256" if order.deep else "size and time"))
        self.events.append(e.CheckpointCompared(at, order.attempt, order.save, fault))

    def news(self) -> list[e.Event]:
        """Return what the brain is to learn since the last call."""
        events, self.events = self.events, []
        return events

    # What is known

    def named(self, path: str) -> int:
        """Return the number of the newest save of a path that a person may name, 0 for none."""
        fit = (CheckpointState.WHOLE, CheckpointState.DISTRUSTED)
        return max((s.number for s in self.saves.values() if s.main == path and s.state in fit), default=0)

    def coming(self) -> list[Checkpoint]:
        """Return the saves that are on their way home."""
        return [save for save in self.saves.values() if save.is_in_transit]

    def is_intact(self, save: Checkpoint) -> bool:
        """Tell whether the bytes of a save that is home are still those that it was entered for."""
        return self.files.at(save.main) == self.versions[save.number]

    # Entries

    def _entry(self, report: Saved, world_size: int) -> Checkpoint:
        """Return the save that a report is about: one that is open or bears a number, or a new one."""
        (group,) = file_groups.group_files([report.path]).values()
        known = [one for one in self.saves.values() if (one.key, one.attempt) == (group.key, report.attempt)]
        last = known[-1] if known else None
        again = last is not None and (last.number in self.open or not group.is_overwritten)
        number = last.number if last is not None and again else len(self.saves) + 1
        return Checkpoint(
            number, group.key, group.series, report.path, report.attempt, world_size, report.count, Format.UNKNOWN,
            Content.STATE, self.fits_any_size, CheckpointState.OPEN, "not every rank has gone on",
        )  # fmt: skip

    def _with_step(self, at: float, save: Checkpoint, attempt: Attempt) -> Checkpoint:
        """Return a save with the job's step, and note where its attempt truly began if it shows that."""
        others = [other for other in self.saves.values() if other.number != save.number]
        misstated, base = steps.are_steps_misstated([*others, save]), attempt.base_step
        began = steps.find_true_start(save, base, others, misstated=misstated)
        if began is not None:
            self.events.append(e.ResumedElsewhere(at, save.attempt, began, save.main, save.steps))
            for other in others:
                if other.attempt == save.attempt and other.step is not None and other.stated is None:
                    self._enter(at, dataclasses.replace(other, step=other.step - base + began))
        step, source = steps.job_step(save, base if began is None else began, misstated=misstated)
        return dataclasses.replace(save, step=step, step_source=source)

    def _enter(self, at: float, save: Checkpoint) -> None:
        """Enter a save that has changed; a whole one has taken the place of an older one of its name."""
        is_new = save.state is CheckpointState.WHOLE and self.saves[save.number].state is not CheckpointState.WHOLE
        self._change(at, save)
        for other in self._of_the_same_name(save) if is_new else ():
            why = f"{'came too late for' if other.is_in_transit else 'was overwritten by'} checkpoint {save.number}"
            gone = dataclasses.replace(other, state=CheckpointState.GONE, why=why, is_in_transit=False)
            self._change(at, gone)

    def _of_the_same_name(self, save: Checkpoint) -> Iterable[Checkpoint]:
        for other in list(self.saves.values()):
            is_here = other.state is CheckpointState.WHOLE and other.locations[0].host == HERE
            is_late = other.is_in_transit and other.number < save.number
            if (is_here or is_late) and other.number != save.number and other.main == save.main:
                yield other

    def _change(self, at: float, save: Checkpoint) -> None:
        if save != self.saves[save.number]:
            self.saves[save.number] = save
            self._tell(at, save)

    def _tell(self, at: float, save: Checkpoint) -> None:
        self.events.append(e.CheckpointChanged(at, save))
