"""Runs of experiment trackers in a job's folder: TensorBoard's event files, and W&B's offline runs.

Rules:
1. Only runs in the job's folder are named: below checkpoints and code, and in folders of the trackers' names. Links are not
   followed.
2. Files older than the submit came with the code, and are not the job's.
3. The search has limits on entries and depth: it is part of `orch status`.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.status_file import Status, TrackerRun

ENTRIES_MAX = 5_000
DEPTH_MAX = 6
RUNS_MAX = 16
"""How many runs are named, the newest."""


def find_runs(job: JobDir, since_s: float) -> tuple[TrackerRun, ...]:
    """Return the runs that were written after a time, seconds since 1970, in the order of their paths."""
    newest: dict[TrackerRun, float] = {}
    for run, written_s in itertools.islice(_scan_entries(job), ENTRIES_MAX):
        if run is not None and written_s >= since_s:
            newest[run] = max(written_s, newest.get(run, 0.0))
    kept = sorted(newest, key=lambda run: newest[run])[-RUNS_MAX:]
    return tuple(sorted(kept, key=lambda run: run.path))


def run_files(run: TrackerRun) -> list[Path]:
    """Return the files of a run, links left out: a run of TensorBoard has those that its folder itself holds."""
    folder = Path(run.path)
    found = folder.rglob("*") if run.kind == "wandb" else folder.glob("*tfevents*")
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def add_runs(job: JobDir, status: Status) -> Status:
    """Return a status that names the job's runs."""
    return replace(status, trackers=find_runs(job, status_file.parse_iso(status.created_at)))


def _scan_entries(job: JobDir) -> Iterator[tuple[TrackerRun | None, float]]:
    """Yield for each entry, those of the upper folders first, the run that it is a file of, if any, and its time."""
    places = (job.checkpoints, job.code, job.root / "tensorboard", job.root / "wandb")
    pending = deque((place, 1) for place in places if not place.is_symlink())
    while pending:
        folder, depth = pending.popleft()
        try:
            with os.scandir(folder) as scan:
                entries = sorted(itertools.islice(scan, ENTRIES_MAX), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            kind = _tracker_kind(folder.name, entry.name)
            try:
                if entry.is_dir(follow_symlinks=False) and depth < DEPTH_MAX and entry.name[0] != ".":
                    pending.append((folder / entry.name, depth + 1))
                if kind and entry.is_file(follow_symlinks=False):
                    yield TrackerRun(kind, str(folder)), entry.stat(follow_symlinks=False).st_mtime
                    continue
            except OSError:
                pass
            yield None, 0.0


def _tracker_kind(folder: str, name: str) -> str:
    """Return the tracker that writes files of this name: TensorBoard's have `tfevents` in theirs."""
    if "tfevents" in name:
        return "tensorboard"
    return "wandb" if name.endswith(".wandb") and folder.startswith("offline-run-") else ""
