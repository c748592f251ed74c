"""Cleanup of a job on this host: ends its processes, then deletes its folder.

Never deleted: the folder that the job was submitted from, and a folder that a living agent on another host uses.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import signal
import time
from pathlib import Path

from orchestrator.agent.bootstrap import job_folder
from orchestrator.agent.bootstrap.replies import request_failure
from orchestrator.agent.process import agent_monitor
from orchestrator.core import codec
from orchestrator.core.host import process_tags, procfs
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import bootstrap as w

EXIT_S_MAX = 10.0
"""How long a monitor and its agent may take after TERM; then both are killed."""

POLL_S = 0.05
NODES_MAX = 10_000

DELETES_MAX = 5
DELETE_RETRY_S = 0.2
"""How often, and at what interval, deleting a folder is tried while a process still writes to it."""


def clean_up(request: w.CleanUp) -> w.CleanedUp:
    """End the job's processes on this host and delete its folder. Raises RequestFailed when it cannot be deleted."""
    job = job_folder.resolve(request.root)
    if job.id != request.job or not job.id:
        raise w.RequestFailed("folder", f"{job.root} is not the folder of job {request.job}")
    job_folder.require_ownership(job)
    nodes = procfs.list_names(job.root / "nodes")[:NODES_MAX]
    for node in nodes:
        _end_monitor(job, node)
    surviving = [pid for node in nodes for pid in agent_monitor.clean_up_node(job, node)]
    if not job.root.is_dir() or job.secrets.exists() or job.journal.exists():
        return w.CleanedUp("")  # it is gone, or the one that the job was submitted from
    living = [node for node in nodes if locks.is_held(job.node(node) / "agent.lock")]
    if living:
        return w.CleanedUp(f"an agent on another host still uses it: {', '.join(living)}")
    if surviving:
        return w.CleanedUp(f"processes that cannot be killed: {', '.join(map(str, surviving))}")
    try:
        _delete(job.root)
    except OSError as err:
        raise request_failure("folder", err, job.root) from err
    with contextlib.suppress(OSError):  # it holds other jobs
        job.root.parent.rmdir()
    return w.CleanedUp("")


def _delete(folder: Path) -> None:
    """Delete a folder; try again while a dying process still writes a last line to it. Raises OSError."""
    for tries_left in reversed(range(DELETES_MAX)):
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            return  # another host that shares the disk was faster
        except OSError as err:
            if err.errno != errno.ENOTEMPTY or not tries_left:
                raise
        time.sleep(DELETE_RETRY_S)


def _end_monitor(job: JobDir, node: str) -> None:
    """End the node's monitor with its agent, if they are on this host."""
    proc = _find_monitor(job.node(node))
    if proc is None:
        return
    procfs.send_signal(proc.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + EXIT_S_MAX
    while procfs.is_alive(proc) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    if procfs.is_alive(proc):
        for pid in (proc.pid, *process_tags.descendants(proc.pid, process_tags.make_tag(job.root, node))):
            procfs.send_signal(pid, signal.SIGKILL)


def _find_monitor(folder: Path) -> procfs.Proc | None:
    """Return the monitor whose record is in `folder`, if it lives on this host."""
    try:
        record = codec.loads_plain((folder / "agent.json").read_bytes())
        proc = procfs.Proc(int(record["pid"]), int(record["start_ticks"]))
    except (OSError, codec.CodecError, KeyError, TypeError, ValueError):
        return None
    return proc if record.get("boot_id") == procfs.boot_id() and procfs.is_alive(proc) else None
