"""Size of a job that srun starts: Slurm's tasks are the ranks, unless srun starts another launcher on each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.spec.launchers.launch_line import (
    ALL,
    CPUS_NODE,
    DEVICE,
    RANKS,
    RANKS_EACH,
    Dropped,
    LaunchLine,
    Setting,
)
from orchestrator.spec.launchers.srun import GPUS_ALL, GPUS_EACH

_COUNTS = (RANKS, RANKS_EACH)


def of_tasks(line: LaunchLine, program: LaunchLine | None = None) -> LaunchLine:
    """Return a line of srun whose tasks are the ranks; `program` is what the tasks run, when it is Python."""
    inner = program or line
    settings, gpus = _without_gpus(line.settings)
    settings = [*_with_device(settings, gpus), *([gpus] if gpus is not None else [])]
    if not any(one.key in _COUNTS for one in settings):
        settings.append(Setting(RANKS_EACH, "1", "srun without --ntasks", yields=True))
    if program is not None:
        settings += program.settings
    dropped = (*line.dropped, *(program.dropped if program is not None else ()))
    return replace(inner, settings=tuple(settings), dropped=dropped)


def nested(line: LaunchLine, inner: LaunchLine) -> LaunchLine:
    """Return a line of srun that starts another launcher, one for each node: that one counts the ranks."""
    settings, gpus = _without_gpus(line.settings)
    why = f"{inner.launcher} starts the ranks, and says how many"
    dropped = [Dropped(one.option, why) for one in settings if one.key in _COUNTS]
    keys = {"slurm.cpus_per_task": CPUS_NODE}
    outer = [replace(one, key=keys.get(one.key, one.key)) for one in settings if one.key not in _COUNTS]
    counts = [one for one in inner.settings if one.key in _COUNTS]
    own = list(inner.settings)
    if gpus is not None and all(one.yields and one.value == ALL for one in counts):
        own = [one for one in own if one not in counts] + [gpus]
    elif gpus is not None:
        own.append(replace(gpus, yields=True))
    return replace(
        inner,
        settings=(*_with_device(outer, gpus), *own),
        dropped=(*line.dropped, *dropped, *inner.dropped),
    )


def _without_gpus(settings: Sequence[Setting]) -> tuple[list[Setting], Setting | None]:
    """Return the settings without those of GPUs, and the GPUs as ranks: of a node, or of all."""
    keys = {GPUS_EACH: RANKS_EACH, GPUS_ALL: RANKS}
    gpus = [replace(one, key=keys[one.key]) for one in settings if one.key in keys]
    return [one for one in settings if one.key not in keys], gpus[-1] if gpus else None


def _with_device(settings: Sequence[Setting], gpus: Setting | None) -> list[Setting]:
    """Return the settings, and the device of ranks: Slurm gives no GPUs that are not asked for. Without any option srun
    uses the nodes that an sbatch script asked for."""
    has_own = any(one.key != "backend" for one in settings) or gpus is not None
    if not has_own or any(one.key == DEVICE for one in settings):
        return list(settings)
    option, device = (gpus.option, "gpu") if gpus is not None else ("srun without GPUs", "cpu")
    return [*settings, Setting(DEVICE, device, option, yields=gpus is None)]
