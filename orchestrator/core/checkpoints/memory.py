"""Checkpoints in the memory of hosts: where their files can be had, and whether they outlive a host. Pure.

- Complete (`WHOLE`) and safe are two things: a complete checkpoint is safe once each of its files is on a disk for all hosts (that of
  the supervisor, or a shared one) or on two hosts.
- A folder in memory belongs to one node of one job, and holds `checkpoints`, where ranks write, and `neighbours`, with copies of
  checkpoints of other nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointFile, CheckpointState, FileLocation

CHECKPOINTS, NEIGHBOURS, DEFAULT_DIR = "checkpoints", "neighbours", "/dev/shm"


def memory_folder(memory_dir: str, job: str, node: str) -> Path:
    """Return the folder in memory of a job's node."""
    return Path(memory_dir) / f"orch-{job}-{node}"


def find_missing(checkpoint: Checkpoint, locations: Iterable[FileLocation]) -> frozenset[str]:
    """Return the names of a checkpoint's files that are in none of these locations."""
    there = set[str]()
    for location in locations:
        there.update(location.names or (piece.name for piece in checkpoint.files))
    return frozenset(piece.name for piece in checkpoint.files if piece.name not in there)


def available_locations(checkpoint: Checkpoint, hosts: Collection[str]) -> tuple[FileLocation, ...]:
    """Return the locations of a checkpoint that can be reached now: on these hosts, or where the supervisor is."""
    return tuple(one for one in checkpoint.locations if not one.host or one.host in hosts)


def safe_files(checkpoint: Checkpoint) -> Iterator[CheckpointFile]:
    """Yield the files of a checkpoint that are on a disk for all hosts, or on two hosts, in memory or on a disk of their own."""
    locations = [(one.host, frozenset(one.names)) for one in checkpoint.locations]
    for piece in checkpoint.files if checkpoint.state is not CheckpointState.PRUNED else ():
        hosts = {host for host, names in locations if not names or piece.name in names}
        if "" in hosts or len(hosts) > 1:
            yield piece


def is_safe(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint outlives the loss of any one host."""
    return len(list(safe_files(checkpoint))) == len(checkpoint.files)
