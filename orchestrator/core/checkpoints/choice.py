"""Choice of the checkpoint that an attempt resumes from, with the reasons why newer ones were skipped. Pure.

- Only complete checkpoints are chosen. Of these only the kind of content that comes first in `Content`: a job that has
  checkpoints with the full state never resumes from weights alone.
- Checkpoints at `checkpoint.path` come before those that a script has saved elsewhere.
- The newest is chosen: the last of the latest attempt. If the last of an earlier attempt has more steps, because the
  script has started from scratch since, that one is chosen.
- If a person has named one, that one is chosen until a later attempt has written another; checkpoints of earlier
  attempts are not chosen any more. If the named one cannot be used, nothing replaces it, not even a start from
  scratch: see `Choice.save`.
- A checkpoint with files of each rank fits only the same number of ranks.
- A checkpoint whose format proves nothing, and that is far smaller than all earlier ones of its series, comes last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.core.checkpoints.save import Content, Format, Save, SaveState

NAMED = (SaveState.WHOLE, SaveState.DISTRUSTED)
"""The states of a checkpoint that a person may name."""

SMALL_SHARE = 0.75
SMALL_THAN_MIN = 2
"""A checkpoint is far smaller if it has less than this share of the bytes of each earlier one, of which there are at
least this many."""

PASSED_MAX = 20
"""How many skipped checkpoints are listed."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A save to start from: its number in the ledger, its main file or folder, and the job's step that it holds, None
    where that is not known."""

    path: str
    step: int | None
    save: int = 0


@dataclass(frozen=True, slots=True)
class Passed:
    """Newer checkpoint that was not chosen, and why."""

    save: int
    main: str
    step: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Pin:
    """Checkpoint that a person has chosen for the resume, and the last attempt before that."""

    save: int
    attempt: int

    def allows(self, save: Save) -> bool:
        """Tell whether a checkpoint is the named one, or was written after it was named."""
        return save.number == self.save or save.attempt > self.attempt

    def is_passed_by(self, save: Save | None) -> bool:
        """Tell whether a later attempt has written the checkpoint, so that the override no longer holds."""
        return save is not None and save.attempt > self.attempt


@dataclass(frozen=True, slots=True)
class Choice:
    """Checkpoint to resume from; None for a start from scratch, or if the named one cannot be used. `misfit`: the newest
    complete one, if it is for another number of ranks: then nothing else is chosen."""

    save: Save | None = None
    misfit: Save | None = None
    passed: tuple[Passed, ...] = ()


def choose(saves: Iterable[Save], world_size: int, pin: Pin | None = None) -> Choice:
    """Return the checkpoint that this number of ranks resumes from."""
    in_order = sorted(saves, key=lambda save: (save.attempt, save.number), reverse=True)
    known = _first_place([save for save in in_order if pin is None or pin.allows(save)], pin)
    usual = min(
        (save.content for save in known if save.is_candidate), key=list(Content).index, default=Content.STATE
    )
    small = _far_smaller(known)
    if not any(save.number not in small and not _unfit(save, usual) for save in known):
        small = {}
    best: Save | None = None
    lasts: set[int] = set()  # attempts whose last usable checkpoint was seen
    passed: list[Passed] = []
    for save in known:
        is_named = pin is not None and save.number == pin.save
        why = "" if is_named and save.state in NAMED else _unfit(save, usual) or small.get(save.number)
        if why:
            if best is None:
                passed.append(_passed(save, why))
            continue
        is_last = save.attempt not in lasts
        lasts.add(save.attempt)
        if best is None:
            best = save
        elif is_last and not is_named and _got_further(save, best):
            passed.append(_passed(best, f"an earlier attempt saved step {save.step:,}"))
            best = save
    if best is not None and not fits(best, world_size):
        return Choice(misfit=best, passed=tuple(passed[:PASSED_MAX]))
    return Choice(best, passed=tuple(passed[:PASSED_MAX]))


def _first_place(saves: list[Save], pin: Pin | None) -> list[Save]:
    """Return the checkpoints at `checkpoint.path`, if one of them can be resumed from, and the one that a person has
    named; else all."""
    named = [save for save in saves if save.is_named or (pin is not None and save.number == pin.save)]
    is_usable = any(
        save.state in NAMED and save.is_candidate and (pin is None or save.number != pin.save)
        for save in named
    )
    return named if is_usable else saves


def expendable(saves: Iterable[Save], keep: int, every: int | None, newest: Save | None) -> list[Save]:
    """Return the complete checkpoints that `checkpoint.keep` does not keep: older than the newest `keep` of their series.

    Always kept are: those that the newest checkpoint calls best or a pointer file names, those of every `every` steps,
    names that are overwritten, the best ones, and the newest.
    """
    by_series: dict[str, list[Save]] = {}
    for save in sorted(saves, key=lambda save: save.number, reverse=True):
        if save.state is SaveState.WHOLE and not save.is_slot:
            by_series.setdefault(save.series, []).append(save)
    cited = set(newest.cites) if newest is not None else set()
    return [
        save
        for series in by_series.values()
        for save in series[keep:]
        if save.content is not Content.BEST
        and not cited & {save.main, save.main.rpartition("/")[2]}
        and not (every and save.step is not None and save.step % every == 0)
        and newest is not None
        and save.number != newest.number
        and not _is_one_step(save, series[0])
    ]


def _is_one_step(save: Save, newest: Save) -> bool:
    return save.attempt == newest.attempt and save.steps == newest.steps and save.steps > 0


def fits(save: Save, world_size: int) -> bool:
    """Tell whether ranks of this number can load a checkpoint."""
    return save.fits_any_size or save.world_size in (0, world_size)


def _unfit(save: Save, usual: Content) -> str:
    """Return why a checkpoint cannot be resumed from; empty if it can."""
    if save.state is not SaveState.WHOLE:
        return f"{save.state.value}: {save.why}" if save.why else save.state.value
    return "" if save.content is usual else save.content.value


def _far_smaller(saves: list[Save]) -> dict[int, str]:
    """Return, by number, why checkpoints that no format proves to be complete may be truncated."""
    by_series: dict[str, list[Save]] = {}
    for save in sorted(saves, key=lambda save: save.number):
        if save.state is SaveState.WHOLE and save.format is Format.UNKNOWN:
            by_series.setdefault(save.series, []).append(save)
    found = {}
    for series in by_series.values():
        least = float("inf")
        for count, save in enumerate(series):
            if count >= SMALL_THAN_MIN and save.size_bytes < SMALL_SHARE * least:
                found[save.number] = f"has {save.size_bytes:,} bytes, earlier ones at least {least:,}"
            else:
                least = min(least, save.size_bytes)
    return found


def _got_further(older: Save, newer: Save) -> bool:
    """Tell whether an earlier attempt's checkpoint has more steps; an adopted one belongs to no attempt."""
    known = older.step is not None and newer.step is not None
    return known and 0 < older.attempt < newer.attempt and (older.step or 0) > (newer.step or 0)


def _passed(save: Save, why: str) -> Passed:
    return Passed(save.number, save.main, save.step, why)
