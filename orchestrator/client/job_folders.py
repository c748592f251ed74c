"""Folders of a job: where its ranks start, what they wrote there, its checkpoints and logs."""

from __future__ import annotations

import os

from orchestrator.client.job_checkpoints import load_checkpoints
from orchestrator.core.checkpoints import file_groups
from orchestrator.core.checkpoints.checkpoint import START_PREFIX, Checkpoint, CheckpointState
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import start_folder
from orchestrator.core.jobdir.layout import JobDir


def job_folders(job: JobDir) -> Json:
    """Return where a job's files are, as `orch folder --json` prints it. Raises ClusterError."""
    complete = [
        checkpoint
        for checkpoint in load_checkpoints(job).values()
        if checkpoint.state is CheckpointState.WHOLE and checkpoint.locations
    ]
    counts_by_folder: dict[str, int] = {}
    for checkpoint in complete:
        host = f"{checkpoint.host}:" if checkpoint.host and not os.path.lexists(checkpoint.path) else ""
        folder = f"{host}{os.path.dirname(checkpoint.path)}"  # noqa: PTH120 -- a host's path, not one of this machine
        counts_by_folder[folder] = counts_by_folder.get(folder, 0) + 1
    try:
        written, links = start_folder.find_written_files(job), start_folder.find_links(job)
    except OSError as err:
        raise ClusterError(f"cannot be read: {err.strerror}", str(job.code), "make it readable") from err
    return {
        "id": job.id,
        "dir": str(job.root),
        "start": str(job.code),
        "written": len(written),
        "links": [{"name": name, "to": to} for name, to in links.items()],
        "checkpoints": [{"dir": folder, "whole": count} for folder, count in counts_by_folder.items()],
        "logs": str(job.logs),
        "checkpoint_path": _path_pattern(complete[-1]) if complete else None,
    }


def _path_pattern(checkpoint: Checkpoint) -> str | None:
    """Return the `checkpoint.path` that matches a checkpoint and those like it; None if the job file already names it."""
    if checkpoint.is_named:
        return None
    glob = file_groups.mask_numbers(checkpoint.main).replace("#", "*")
    return f"{{job_dir}}/code/{glob}" if checkpoint.base_folder == START_PREFIX else f"{checkpoint.base_folder}/{glob}"
