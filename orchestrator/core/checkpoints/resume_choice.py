"""Choice of the checkpoint that an attempt resumes from, with the reasons why newer ones were skipped. Pure.

- Only complete checkpoints are chosen. Of these only the kind of content that comes first in `Content`: a job that has
  checkpoints with the full state never resumes from weights alone.
- Checkpoints at `checkpoint.path` come before those that a script has saved elsewhere.
- The newest is chosen: the last of the latest attempt. If the last of an earlier attempt has more steps, because the
  script has started from scratch since, that one is chosen.
- If a person has named one, that one is chosen until a later attempt has written another; checkpoints of earlier
  attempts are not chosen any more. If the named one cannot be used, nothing replaces it, not even a start from
  scratch: see `ResumeChoice.checkpoint`.
- A checkpoint with files of each rank fits only the same number of ranks.
- A checkpoint whose format proves nothing, and that is far smaller than all earlier ones of its series, comes last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState, Content, Format

OVERRIDE_STATES = (CheckpointState.WHOLE, CheckpointState.DISTRUSTED)
"""The states of a checkpoint that a person may name."""

SMALL_SHARE = 0.75
SMALL_THAN_MIN = 2
"""A checkpoint is far smaller if it has less than this share of the bytes of each earlier one, of which there are at
least this many."""

SKIPPED_MAX = 20
"""How many skipped checkpoints are listed."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A save to start from: its number in the ledger, its main file or folder, and the job's step that it holds, None
    where that is not known."""

    path: str
    step: int | None
    save: int = 0


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """Newer checkpoint that was not chosen, and why."""

    save: int
    main: str
    step: int | None
    why: str


@dataclass(frozen=True, slots=True)
class ResumeOverride:
    """Checkpoint that a person has chosen for the resume, and the last attempt before that."""

    save: int
    attempt: int

    def allows(self, checkpoint: Checkpoint) -> bool:
        """Tell whether a checkpoint is the named one, or was written after it was named."""
        return checkpoint.number == self.save or checkpoint.attempt > self.attempt

    def is_superseded_by(self, checkpoint: Checkpoint | None) -> bool:
        """Tell whether a later attempt has written the checkpoint, so that the override no longer holds."""
        return checkpoint is not None and checkpoint.attempt > self.attempt


@dataclass(frozen=True, slots=True)
class ResumeChoice:
    """Checkpoint to resume from; None for a start from scratch, or if the named one cannot be used. `world_size_mismatch`: the newest
    complete one, if it is for another number of ranks: then nothing else is chosen."""

    checkpoint: Checkpoint | None = None
    world_size_mismatch: Checkpoint | None = None
    skipped: tuple[SkippedCheckpoint, ...] = ()


def choose_checkpoint(
    checkpoints: Iterable[Checkpoint], world_size: int, override: ResumeOverride | None = None
) -> ResumeChoice:
    """Return the checkpoint that this number of ranks resumes from."""
    in_order = sorted(checkpoints, key=lambda save: (save.attempt, save.number), reverse=True)
    candidates = _prefer_named_path(
        [checkpoint for checkpoint in in_order if override is None or override.allows(checkpoint)], override
    )
    usual = min(
        (save.content for save in candidates if save.is_candidate),
        key=list(Content).index,
        default=Content.STATE,
    )
    small = _find_truncated(candidates)
    if not any(save.number not in small and not _unfit_reason(save, usual) for save in candidates):
        small = {}
    best: Checkpoint | None = None
    lasts: set[int] = set()  # attempts whose last usable checkpoint was seen
    skipped: list[SkippedCheckpoint] = []
    for save in candidates:
        is_named = override is not None and save.number == override.save
        why = "" if is_named and save.state in OVERRIDE_STATES else _unfit_reason(save, usual) or small.get(save.number)
        if why:
            if best is None:
                skipped.append(_skipped(save, why))
            continue
        is_last = save.attempt not in lasts
        lasts.add(save.attempt)
        if best is None:
            best = save
        elif is_last and not is_named and _got_further(save, best):
            skipped.append(_skipped(best, f"an earlier attempt saved step {save.step:,}"))
            best = save
    if best is not None and not fits_world_size(best, world_size):
        return ResumeChoice(world_size_mismatch=best, skipped=tuple(skipped[:SKIPPED_MAX]))
    return ResumeChoice(best, skipped=tuple(skipped[:SKIPPED_MAX]))


def _prefer_named_path(checkpoints: list[Checkpoint], override: ResumeOverride | None) -> list[Checkpoint]:
    """Return the checkpoints at `checkpoint.path`, if one of them can be resumed from, and the one that a person has
    named; else all."""
    named = [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.is_named or (override is not None and checkpoint.number == override.save)
    ]
    is_usable = any(
        checkpoint.state in OVERRIDE_STATES
        and checkpoint.is_candidate
        and (override is None or checkpoint.number != override.save)
        for checkpoint in named
    )
    return named if is_usable else checkpoints


def find_expendable(
    checkpoints: Iterable[Checkpoint], keep: int, every: int | None, newest: Checkpoint | None
) -> list[Checkpoint]:
    """Return the complete checkpoints that `checkpoint.keep` does not keep: older than the newest `keep` of their series.

    Always kept are: those that the newest checkpoint calls best or a pointer file names, those of every `every` steps,
    names that are overwritten, the best ones, and the newest.
    """
    by_series: dict[str, list[Checkpoint]] = {}
    for checkpoint in sorted(checkpoints, key=lambda save: save.number, reverse=True):
        if checkpoint.state is CheckpointState.WHOLE and not checkpoint.is_overwritten:
            by_series.setdefault(checkpoint.series, []).append(checkpoint)
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


def _is_one_step(checkpoint: Checkpoint, newest: Checkpoint) -> bool:
    return checkpoint.attempt == newest.attempt and checkpoint.steps == newest.steps and checkpoint.steps > 0


def fits_world_size(checkpoint: Checkpoint, world_size: int) -> bool:
    """Tell whether ranks of this number can load a checkpoint."""
    return checkpoint.fits_any_size or checkpoint.world_size in (0, world_size)


def _unfit_reason(checkpoint: Checkpoint, usual: Content) -> str:
    """Return why a checkpoint cannot be resumed from; empty if it can."""
    if checkpoint.state is not CheckpointState.WHOLE:
        return f"{checkpoint.state.value}: {checkpoint.why}" if checkpoint.why else checkpoint.state.value
    return "" if checkpoint.content is usual else checkpoint.content.value


def _find_truncated(checkpoints: list[Checkpoint]) -> dict[int, str]:
    """Return, by number, why checkpoints that no format proves to be complete may be truncated."""
    by_series: dict[str, list[Checkpoint]] = {}
    for checkpoint in sorted(checkpoints, key=lambda save: save.number):
        if checkpoint.state is CheckpointState.WHOLE and checkpoint.format is Format.UNKNOWN:
            by_series.setdefault(checkpoint.series, []).append(checkpoint)
    reasons = {}
    for series in by_series.values():
        least = float("inf")
        for count, checkpoint in enumerate(series):
            if count >= SMALL_THAN_MIN and checkpoint.size_bytes < SMALL_SHARE * least:
                reasons[checkpoint.number] = f"has {checkpoint.size_bytes:,} bytes, earlier ones at least {least:,}"
            else:
                least = min(least, checkpoint.size_bytes)
    return reasons


def _got_further(older: Checkpoint, newer: Checkpoint) -> bool:
    """Tell whether an earlier attempt's checkpoint has more steps; an adopted one belongs to no attempt."""
    known = older.step is not None and newer.step is not None
    return known and 0 < older.attempt < newer.attempt and (older.step or 0) > (newer.step or 0)


def _skipped(checkpoint: Checkpoint, why: str) -> SkippedCheckpoint:
    return SkippedCheckpoint(checkpoint.number, checkpoint.main, checkpoint.step, why)
