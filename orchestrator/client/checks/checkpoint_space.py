"""Where a job writes its checkpoints outside its own folder, and how large the last one of an earlier job was."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from orchestrator.agent.outputs.checkpoint_formats import inspect_shape
from orchestrator.core.host_facts import UNKNOWN
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.plan import Plan

JOBS_READ_MAX = 5
"""How many earlier jobs of the same name are searched for a checkpoint."""


def folder_of(plan: Plan) -> tuple[str, ...]:
    """Return the folder of checkpoints where the job names one outside its own, up to the first pattern."""
    path = Path(plan.checkpoint_glob)
    if not path.is_absolute():
        return ()
    parts = list(itertools.takewhile(lambda part: not set(part) & set("*?["), path.parts[:-1]))
    return (str(Path(*parts)),)


def last_bytes(plan: Plan, environ: Mapping[str, str]) -> int:
    """Return the size of the newest checkpoint that an earlier job of this name has left here, UNKNOWN without one."""
    named = [job for job in home.jobs(home.home(environ)) if home.name_of(job.id) == plan.name]
    for job in reversed(named[-JOBS_READ_MAX:]):
        try:
            sizes = [
                inspect_shape(path) for path in job.checkpoints.iterdir() if not path.name.startswith(".")
            ]
        except OSError:
            continue
        if sizes:
            return max(sizes, key=lambda shape: shape.mtime_ns).size_bytes
    return UNKNOWN
