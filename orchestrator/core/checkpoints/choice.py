"""The save that an attempt begins from, and why newer ones were passed over. Pure.

- Only whole saves count, and of those the kind of content that comes first in `Content` of all that the job has written:
  weights alone are not resumed from where there are saves with the whole state.
- Those where `checkpoint.path` says count before those that a script has saved elsewhere.
- The newest counts: the last of the latest attempt. If the last of an earlier attempt got further, as one did before a
  script began again, that counts.
- Where a person has named one, that counts until an attempt after it has written another; what earlier attempts wrote
  does not count any more then. If the named one cannot be used, nothing takes its place, not even the beginning: see
  `Choice.save`.
- A save whose files belong to ranks fits that number of ranks only.
- One of a format that proves nothing, and far smaller than all before it in its series, comes after all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.core.checkpoints.save import Content, Format, Save, SaveState

NAMED = (SaveState.WHOLE, SaveState.DISTRUSTED)
"""The states of a save that a person may name."""

SMALL_SHARE = 0.75
SMALL_THAN_MIN = 2
"""A save is far smaller with less than this part of the bytes of each save before it, of at least so many."""

PASSED_MAX = 20
"""How many passed saves are named."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A newer save that was not chosen, and why."""

    save: int
    main: str
    step: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Pin:
    """A save that a person has named, and the last attempt before that."""

    save: int
    attempt: int

    def allows(self, save: Save) -> bool:
        """Tell whether a save is the named one, or written after that was named."""
        return save.number == self.save or save.attempt > self.attempt

    def is_passed_by(self, save: Save | None) -> bool:
        """Tell whether a later attempt has written the save: what was written before the pin is left behind."""
        return save is not None and save.attempt > self.attempt


@dataclass(frozen=True, slots=True)
class Choice:
    """The save to begin from; None for the beginning, or where a person has named one that cannot be used. `misfit`: the
    newest whole one, if it is for another number of ranks: then nothing else is chosen in its place."""

    save: Save | None = None
    misfit: Save | None = None
    passed: tuple[Passed, ...] = ()


def choose(saves: Iterable[Save], world_size: int, pin: Pin | None = None) -> Choice:
    """Return the save that ranks of this number begin from."""
    in_order = sorted(saves, key=lambda save: (save.attempt, save.number), reverse=True)
    known = _first_place([save for save in in_order if pin is None or pin.allows(save)], pin)
    usual = min(
        (save.content for save in known if save.is_candidate), key=list(Content).index, default=Content.STATE
    )
    small = _far_smaller(known)
    if not any(save.number not in small and not _unfit(save, usual) for save in known):
        small = {}
    best: Save | None = None
    lasts: set[int] = set()  # attempts whose last fit save was seen
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
    """Return the saves where `checkpoint.path` says, if one of them could be begun from, and the one that a person has named; else
    all."""
    named = [save for save in saves if save.is_named or (pin is not None and save.number == pin.save)]
    is_usable = any(
        save.state in NAMED and save.is_candidate and (pin is None or save.number != pin.save)
        for save in named
    )
    return named if is_usable else saves


def expendable(saves: Iterable[Save], keep: int, every: int | None, newest: Save | None) -> list[Save]:
    """Return the whole saves that `checkpoint.keep` does not keep: older than the newest `keep` of their series.

    Those stay that the newest save calls best or a pointer names, those of every `every` steps, names that are written
    again and again, the best ones, and the newest.
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
    """Tell whether ranks of this number can load a save."""
    return save.fits_any_size or save.world_size in (0, world_size)


def _unfit(save: Save, usual: Content) -> str:
    """Return why a save is not resumed from, empty if it is fit."""
    if save.state is not SaveState.WHOLE:
        return f"{save.state.value}: {save.why}" if save.why else save.state.value
    return "" if save.content is usual else save.content.value


def _far_smaller(saves: list[Save]) -> dict[int, str]:
    """Return, by number, why whole saves may be cut off that no format proves to be whole."""
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
    """Tell whether an earlier attempt's save has more steps; one that a person has adopted is of no attempt."""
    known = older.step is not None and newer.step is not None
    return known and 0 < older.attempt < newer.attempt and (older.step or 0) > (newer.step or 0)


def _passed(save: Save, why: str) -> Passed:
    return Passed(save.number, save.main, save.step, why)
