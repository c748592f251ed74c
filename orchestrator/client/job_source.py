"""Source of a job's state by backend, through which it is also cancelled.

A job on local or ssh has a supervisor on the submit machine, which writes the job's state into its folder.
A Slurm job is also in Slurm's queue: see `slurm_status`.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.core import codec
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import full_disk, locks, ownership, requests, status_file
from orchestrator.core.jobdir.layout import JobDir, attempt_of
from orchestrator.core.jobdir.status_file import Status
from orchestrator.submission import supervisor_process

if TYPE_CHECKING:
    from orchestrator.core.jobdir.plan import Plan

STATE_POLL_S = 0.02
STATE_S_MAX = 10.0
"""Limit on a new supervisor's first status."""

REWRITE_S_MAX = 1.2
"""How long a late status is watched: a live supervisor replaces it twice a second."""

RESUME_S_MAX = 30.0
"""Limit on the start of a resumed job's next attempt."""


@dataclass(frozen=True, slots=True)
class JobSource:
    """Source of a job with a supervisor on a submit machine."""

    folder: JobDir

    def slurm_id(self) -> str | None:
        """Return Slurm's id of the job, the latest; None for a job that Slurm was never given. Raises ClusterError."""
        return None

    def settle(self) -> None:
        """Restart the job's supervisor if it died; act on Slurm's state of the job. Raises ClusterError."""
        supervisor_process.restart_supervisor(self.folder)

    def written_status(self) -> Status:
        """Return the supervisor's status, with the supervisor's process if it is old. Raises FileNotFoundError."""
        status = status_file.read(self.folder, time.time(), procfs.boot_id())
        if not status.is_late:
            return status
        if not status.copy_of and (now := self._await_rewrite(status)) is not None:
            return now
        full = str(self.folder.root) if full_disk.is_disk_full(self.folder.root) else ""
        return replace(status, supervisor=locks.read_holder(self.folder.lock), full_disk=full)

    def changed_imports(self) -> dict[int, dict[str, None]]:
        """Return by attempt the files that ranks imported, that are not in the snapshot, and that were others before. What ranks
        note of them is on this disk; of hosts over SSH nothing is known."""
        first: dict[str, str] = {}
        changed: dict[int, dict[str, None]] = {}
        for file in sorted(self.folder.root.glob("nodes/*/*/*/imports.txt"), key=lambda one: one.parts[-3]):
            with contextlib.suppress(OSError):
                for line in ownership.read_regular(file).decode(errors="replace").splitlines():
                    time_ns, _, path = line.partition(" ")
                    if first.setdefault(path, time_ns) != time_ns:
                        changed.setdefault(attempt_of(file.parents[1]) or 0, {})[path] = None
        return changed

    def _await_rewrite(self, late_status: Status) -> Status | None:
        """Return what a supervisor has written while its status was watched, which proves that only the clocks of two machines
        differ; None where it writes no more. Raises FileNotFoundError."""
        deadline_s = time.monotonic() + REWRITE_S_MAX
        while time.monotonic() < deadline_s:
            time.sleep(STATE_POLL_S)
            now = status_file.read(self.folder, status_file.parse_iso(late_status.written_at))
            if now.written_at != late_status.written_at:
                return replace(now, written_s=0.0)
        return None

    def status(self) -> Status:
        """Return the last status, joined with Slurm's state of a job in its queue; start nothing. Raises ClusterError."""
        deadline_s = time.monotonic() + STATE_S_MAX
        while True:
            try:
                return self.written_status()
            except FileNotFoundError:
                is_beginning = self.folder.plan.exists() and not self.folder.ended.exists()
                if not is_beginning or time.monotonic() > deadline_s:
                    raise _no_status_error(self.folder) from None
                time.sleep(STATE_POLL_S)

    def settled_status(self) -> Status:
        """Return the status after `settle`. Raises ClusterError."""
        self.settle()
        return self.status()

    def queue_fields(self) -> Json:
        """Return what the queue adds to the post-mortem of a running job: its state while there is no supervisor."""
        return {}

    def nodes(self) -> list[str]:
        """Return the names of the job's nodes; of a Slurm job those that it has used so far.

        Raises ClusterError when the plan is missing or damaged.
        """
        return [node.name for node in self.plan().nodes]

    def batch_lines(self) -> list[str]:
        """Return the last lines that a batch script of Slurm has printed, with the secrets masked."""
        return []

    def cancel(self) -> None:
        """Request the job's end. Raises ClusterError when Slurm refuses it, or the request cannot be written."""
        requests.send(self.folder.requests, "cancel")

    def await_resume(self, ended_status: Status) -> None:
        """Wait until the status shows a resume: before that a wait for the job's end would see the old end."""
        deadline_s = time.monotonic() + RESUME_S_MAX
        while _is_same_end(ended_status, self.status()):
            if time.monotonic() > deadline_s:
                what = f"no new attempt started within {RESUME_S_MAX:g} s"
                raise ClusterError(what, self.folder.id, f"see {self.folder.supervisor_log}")
            time.sleep(STATE_POLL_S)

    def plan(self) -> Plan:
        """Return the plan made at submit. Raises ClusterError when the plan is missing or damaged."""
        from orchestrator.core.jobdir.plan import Plan  # slow to load, and not needed for a status

        fix = "the job folder is damaged; submit the job again"
        try:
            return codec.loads(Plan, ownership.read_regular(self.folder.plan))
        except OSError as err:
            what = f"the job's plan cannot be read: {err.strerror}"
            raise ClusterError(what, str(self.folder.plan), fix) from err
        except codec.KeysError as err:
            what = f"the job's plan is damaged, or another version of orch wrote it: {err}"
            raise ClusterError(what, str(self.folder.plan), status_file.OTHER_VERSION_FIX) from err
        except codec.CodecError as err:
            raise ClusterError(f"the job's plan is damaged: {err}", str(self.folder.plan), fix) from err


def _is_same_end(ended_status: Status, current: Status) -> bool:
    """Return whether an ended job's status is still that of the same end; times jitter, so they are not compared."""
    begun = ended_status.started_at is None and current.started_at is not None
    return current.state in status_file.ENDED and current.attempt == ended_status.attempt and not begun


def _no_status_error(job: JobDir) -> ClusterError:
    if not job.plan.exists():
        return ClusterError("this is not a complete job folder: it has no plan.json", str(job.root), "delete it")
    if job.ended.exists():
        return ClusterError("the status file is missing", str(job.state), "`orch why` reads the journal")
    what = f"no status was written within {STATE_S_MAX:g} s"
    return ClusterError(what, str(job.root), f"see {job.supervisor_log}")
