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

_OF_TASKS = (RANKS, RANKS_EACH, "slurm.cpus_per_task")


def of_tasks(line: LaunchLine, program: LaunchLine | None = None) -> LaunchLine:
    """Return a line of srun whose tasks are the ranks; `program` is what the tasks run, when it is Python."""
    inner = program or line
    settings, gpus = _without_gpus(line.settings)
    ranks = _firm(settings, RANKS_EACH) or _firm(settings, RANKS)
    if ranks is None and gpus is not None:
        settings.append(gpus)
    more = program.settings if program is not None else ()
    dropped = (*line.dropped, *(program.dropped if program is not None else ()))
    settings = _with_device(settings, gpus)
    if ranks is not None and gpus is not None:
        settings.append(gpus)
    if ranks is None and gpus is None:
        settings.append(Setting(RANKS_EACH, "1", "srun without --ntasks", yields=True))
    return replace(inner, settings=(*settings, *more), dropped=dropped)


def nested(line: LaunchLine, inner: LaunchLine) -> LaunchLine:
    """Return a line of srun that starts another launcher, one for each node: that one counts the ranks."""
    settings, gpus = _without_gpus(line.settings)
    tasks = [one for one in settings if one.key in _OF_TASKS[:2]]
    dropped = [Dropped(one.option, f"{inner.launcher} starts the ranks, and says how many") for one in tasks]
    outer = [
        replace(one, key=CPUS_NODE) if one.key == "slurm.cpus_per_task" else one
        for one in settings
        if one.key not in (RANKS, RANKS_EACH)
    ]
    counts = [one for one in inner.settings if one.key in (RANKS, RANKS_EACH)]
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


def _firm(settings: Sequence[Setting], key: str) -> Setting | None:
    return next((one for one in settings if one.key == key), None)


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
