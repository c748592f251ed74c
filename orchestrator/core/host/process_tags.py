"""Tags of a job's processes: an environment variable that identifies them, even when their parents are gone.

A tag has the job, the node, and the job's folder by device and inode: a copy of the folder is another folder, one that was
renamed or mounted elsewhere is the same. What a supervisor starts without a separate tag has the supervisor's, which
has no node. Tags separate a job from the jobs that its ranks submit.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.core.host import procfs

NAME = "ORCH_TAG"


def make_tag(job: Path, node: str) -> str:
    """Return the tag of a node's processes in the job folder `job`; without a node that of its supervisor. Raises OSError."""
    about = job.stat()
    return f"{job.name}/{node}@{about.st_dev}:{about.st_ino}"


def find_tagged(tag: str) -> list[int]:
    """Return the processes that were started with a tag."""
    return [proc.pid for proc in procfs.find_by_env(f"{NAME}={tag}".encode())]


def descendants(pid: int, tag: str) -> list[int]:
    """Return the descendants of a process, without those of jobs that they have submitted. `tag`: one of the job's own."""
    tree, below = procfs.children(), [pid]
    for parent in below:  # grows while it is walked
        below += [child for child in tree.get(parent, ()) if not _is_of_another(child, tag)]
    return below[1:]


def _is_of_another(pid: int, tag: str) -> bool:
    """Return whether a process has the tag of a job other than that of `tag`; one without a tag has not."""
    other = procfs.environment(pid, NAME)
    return bool(other) and _job(other) != _job(tag)


def _job(tag: str) -> tuple[str, str]:
    return tag.partition("/")[0], tag.rpartition("@")[2]
