"""The job's step of a checkpoint, and the step at which its attempt really started. Pure.

- The step that a checkpoint states is preferred to the counted one, unless stated steps go back while steps are made, as
  the step of an epoch does.
- A script that did not resume from its given checkpoint is found by its own checkpoints: the step that one states, less
  the steps of its attempt, is another start; so is a numbered name that an earlier attempt has written.
- Stated steps show that only if one stated step is one counted step: an iteration of PPO has several.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import pairwise

from orchestrator.core.checkpoints.checkpoint import Checkpoint, StepSource

NEAR_STEPS = 2
"""Error of a count that is taken from file times: their clock ticks every 4 to 10 ms, a step may take 1."""

FAR_STEPS = 3 * NEAR_STEPS
"""Error of a sum of three such counts."""

CONSTANT_MIN = 3
"""A number that is equal in this many checkpoints of an attempt is a setting, not a step."""


def are_steps_misstated(checkpoints: Iterable[Checkpoint]) -> bool:
    """Tell whether stated steps go back, or stay equal, while an attempt makes steps."""
    stating = _group_stating_checkpoints(checkpoints)
    return any(
        (later.stated or 0) < (earlier.stated or 0) and later.steps >= earlier.steps
        for own in stating.values()
        for earlier, later in pairwise(own)
    ) or any(
        len(own) >= CONSTANT_MIN and own[0].stated == own[-1].stated and own[-1].steps > own[0].steps + FAR_STEPS
        for own in stating.values()
    )


def _group_stating_checkpoints(checkpoints: Iterable[Checkpoint]) -> dict[int, list[Checkpoint]]:
    """Return the checkpoints that state a step, by attempt, in their order."""
    by_attempt: dict[int, list[Checkpoint]] = {}
    for checkpoint in sorted(checkpoints, key=lambda save: save.number):
        if checkpoint.stated is not None and checkpoint.steps:
            by_attempt.setdefault(checkpoint.attempt, []).append(checkpoint)
    return by_attempt


def _are_single(checkpoints: Collection[Checkpoint]) -> bool:
    """Tell whether one stated step is one counted step: each attempt made as many of both from its first checkpoint to its
    last, the first attempt from 0."""
    first = min(checkpoint.attempt for checkpoint in checkpoints)
    drifts: list[int] = []
    for attempt, own in _group_stating_checkpoints(checkpoints).items():
        ends = [(checkpoint.stated or 0) - checkpoint.steps for checkpoint in own]
        ends = [0, *ends] if attempt == first > 0 else ends
        drifts += [ends[-1] - ends[0]] if len(ends) > 1 else []
    return bool(drifts) and all(abs(drift) <= NEAR_STEPS for drift in drifts)


def job_step(checkpoint: Checkpoint, base_step: int, *, misstated: bool) -> tuple[int | None, StepSource]:
    """Return the job's step of a checkpoint whose attempt began at `base_step`, and its source."""
    if checkpoint.stated is not None and not misstated:
        return checkpoint.stated, StepSource.STATED
    if not checkpoint.steps:
        return None, StepSource.UNKNOWN
    counted = base_step + checkpoint.steps
    near = [number for number in _numbers(checkpoint.main) if abs(number - counted) <= NEAR_STEPS]
    return (near[-1] if near else counted), StepSource.COUNTED


def _numbers(name: str) -> list[int]:
    """Return the numbers in the last part of a name, without that of a rank and the version that Lightning appends."""
    last = re.sub(r"rank[-_=]?[0-9]+|-v[0-9]+(?=[.]|$)", "", name.rpartition("/")[2])
    return [int(digits) for digits in re.findall(r"[0-9]{1,15}", last)]


def find_true_start(
    checkpoint: Checkpoint,
    base_step: int,
    others: Collection[Checkpoint],
    *,
    misstated: bool,
    read: int = 0,
) -> int | None:
    """Return the step at which the attempt of a checkpoint really began, if that differs from `base_step`; else None.

    It is 0, the step of an earlier checkpoint that the script has chosen itself, or `read`, the step of a file of another
    job that it had read, if the checkpoint states as many more as its attempt had made.
    """
    if read and not misstated and checkpoint.stated is not None and base_step <= NEAR_STEPS:
        return read if abs(checkpoint.stated - checkpoint.steps - read) <= NEAR_STEPS and checkpoint.steps else None
    earlier = [other for other in others if other.attempt < checkpoint.attempt and other.step is not None]
    truth = None if misstated else checkpoint.stated
    if truth is not None and not _are_single([*others, checkpoint]):
        return None
    if truth is None and checkpoint.key != checkpoint.series:
        truth = next((other.step for other in earlier if other.key == checkpoint.key), None)
    if truth is None or not checkpoint.steps or base_step <= NEAR_STEPS:
        return None
    begun = truth - checkpoint.steps
    if begun >= base_step - FAR_STEPS:
        return None
    if abs(begun) <= NEAR_STEPS:
        return 0
    near = [other.step for other in earlier if other.step is not None and abs(other.step - begun) <= FAR_STEPS]
    return min(near, key=lambda step: abs(step - begun)) if near else None
