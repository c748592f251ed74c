"""Status of a Slurm job, merged from its folder and Slurm's queue, and the actions that follow from the queue.

Rules: while a supervisor lives, the folder is right; otherwise Slurm is. A job is closed from here only when Slurm says
that it has ended for good; where Slurm does not know the job, only when nothing in the folder still changes and scontrol
confirms squeue. Then a request says so, and a supervisor without nodes, on this machine, ends the job. A user who
cannot write to the folder only reads. A missing answer of Slurm never counts as a no.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import PurePath

from orchestrator.client import slurm_close
from orchestrator.client.job_source import JobSource
from orchestrator.client.logs import secret_mask
from orchestrator.core import codec
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, Fault, OrchError
from orchestrator.core.host import file_age, procfs
from orchestrator.core.jobdir import home, ownership, requests, status_file
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import QueueStatus, Status
from orchestrator.core.slurm import command_output
from orchestrator.core.slurm.command_output import QueueJob
from orchestrator.core.slurm.job_states import Stage
from orchestrator.core.slurm.queue import SlurmQueue, is_over
from orchestrator.core.status_types import AllocationEndCause
from orchestrator.core.text import one_line_fault, what_and_fix

QUEUE = SlurmQueue()
"""This process's view of Slurm's queue: all its jobs share the queries."""

SUBMIT_S_MAX = 300.0
"""Limit on handing a job to Slurm; after that the submit counts as interrupted."""

STILL_S = 1.5
"""A living supervisor writes its status every half second; one that does not for this long is dead."""

SILENT_CANCEL_S = 30.0
"""How long a supervisor that writes no status has to stop a cancelled job, before Slurm cancels it."""

LIVING_CANCEL_S = 60.0
"""The same for a supervisor that writes its status, in addition to the grace of the ranks."""

BATCH_LINE_CHARS_MAX = 300
BATCH_LOG_BYTES_MAX = 64 << 10


def latest_slurm_id(job: JobDir) -> str | None:
    """Return the latest Slurm id of a job; None for a job that Slurm was never given. Raises ClusterError."""
    try:
        ids = codec.loads(tuple[str, ...], ownership.read_regular(job.slurm))
    except FileNotFoundError:
        return None
    except (OSError, codec.CodecError) as err:
        raise ClusterError(f"Slurm's ids of the job cannot be read: {err}", str(job.slurm), _IDS_FIX) from err
    if not all(map(str.isdigit, ids)):
        raise ClusterError("Slurm's ids of the job are damaged", str(job.slurm), _IDS_FIX)
    return ids[-1] if ids else None


_IDS_FIX = 'write the list of its ids again, the latest last: ["1234"]; squeue or sacct shows them'


def prefetch(jobs: Iterable[JobDir]) -> None:
    """Query Slurm for all these jobs at once, so that their statuses need no separate query."""
    ids = []
    for job in jobs:
        with contextlib.suppress(ClusterError):
            job_id = latest_slurm_id(job)
            ids += [job_id] if job_id else []
    if ids:
        QUEUE.query(ids)


class SlurmSource(JobSource):
    """Source of a job whose supervisor runs in an allocation."""

    __slots__ = ()

    def slurm_id(self) -> str | None:
        """See `JobSource.slurm_id`."""
        return latest_slurm_id(self.folder)

    def settle(self) -> None:
        """Act on Slurm's state: close an ended job, and cancel a job that its supervisor has not cancelled.

        Raises ClusterError when that cannot be done.
        """
        if self.folder.ended.exists() or not home.is_own_job(self.folder):
            return
        queued = _query_slurm(self.folder)
        if queued is None:
            if file_age.age_s(self.folder.plan) > SUBMIT_S_MAX:
                why = one_line_fault("its submit was interrupted before Slurm had the job", fix="submit it again")
                slurm_close.close_job(self.folder, "", AllocationEndCause.FAILED, why)
            return
        if queued.unanswered:
            return
        if not is_over(queued):
            _enforce_cancel(self.folder, queued)
        elif queued.stage is Stage.OVER or _is_unchanged(self.folder):
            queued = _verify_job(self.folder, QUEUE.confirm(queued))
            if is_over(queued) and not queued.unanswered:
                allocation = queued.id if queued.restarts is None else f"{queued.id}.{queued.restarts}"
                slurm_close.close_job(self.folder, allocation, queued.cause, _end_reason(self.folder, queued))

    def status(self) -> Status:
        """See `JobSource.status`. The queue's state does not apply to a copy of the folder."""
        if self.folder.ended.exists() or home.find_original(self.folder) is not None:
            return super().status()
        try:
            written = self.written_status()
        except FileNotFoundError:
            written = None
        return replace(join_status(self.folder, written, self.plan), dir=str(self.folder.root))

    def queue_fields(self) -> Json:
        """See `JobSource.queue_fields`."""
        try:
            status = status_file.to_json(self.status())
        except OrchError:
            return {}
        return {key: status[key] for key in ("state", "reason", "queue") if key in status}

    def nodes(self) -> list[str]:
        """See `JobSource.nodes`."""
        from orchestrator.client.logs import reader  # a status does not need it

        return reader.nodes(self.folder)

    def batch_lines(self) -> list[str]:
        """Return the lines that a job's batch script has printed, the last ones of many, with the secrets masked."""
        try:
            with os.fdopen(ownership.open_inside(self.folder.batch_log), "rb") as file:
                begin = max(0, os.fstat(file.fileno()).st_size - BATCH_LOG_BYTES_MAX)
                file.seek(begin)
                text = file.read(BATCH_LOG_BYTES_MAX).decode(errors="replace")
            lines = secret_mask.load_mask(self.folder).apply(text).splitlines()
        except OSError:
            return []
        except ValueError:
            return ["(not shown: the job's secrets are damaged, so the output cannot be masked)"]
        if begin:
            del lines[0]  # it is cut off, perhaps inside a secret
        return [line.rstrip() for line in lines if line.strip()]

    def cancel(self) -> None:
        """Cancel a job: through Slurm while it waits in the queue, otherwise through its supervisor.

        Raises ClusterError when Slurm refuses, and UserError for another user's job.
        """
        try:
            requests.send(self.folder.requests, "cancel")
        except ClusterError as err:
            raise _cancel_through_slurm(self.folder, err) from err
        QUEUE.invalidate()
        queued = _query_slurm(self.folder)
        if queued is not None and not queued.unanswered and queued.stage is Stage.WAITING:
            refusal = QUEUE.cancel(queued.id)
            if refusal:
                fix = f"when Slurm answers again: orch cancel {self.folder.id}, or scancel {queued.id}"
                raise ClusterError(f"scancel {queued.id}: {refusal}", self.folder.id, fix)
        self.settle()

    def await_resume(self, ended_status: Status) -> None:
        """Write the status of a job that waits for nodes again: until it has them no supervisor writes one, and its last end
        must not show."""
        plan, now_iso = self.plan(), status_file.iso(time.time())  # the new plan, where there were overrides
        earlier = status_file.clear_nodes(ended_status)
        status = replace(
            earlier,
            state="QUEUED",
            reason="",
            ended_at=None,
            written_at=now_iso,
            world_size=plan.world_size,
            training=replace(earlier.training, total_steps=plan.total_steps),
            effective_batch=plan.effective_batch,
        )
        status_file.write(self.folder, status, durable=False)
        QUEUE.invalidate()


# The status


def join_status(job: JobDir, written: Status | None, plan: Callable[[], Plan]) -> Status:
    """Return a job's status with Slurm's state of it. `written`: the supervisor's status, if there is one.

    Raises ClusterError when the job's folder is damaged.
    """
    queued = _query_slurm(job)
    if queued is None:
        return written or status_file.status_from_plan(plan(), "QUEUED", "it is being submitted to Slurm", time.time())
    description = _describe(job, queued)
    queue_status = QueueStatus(
        id=queued.id,
        state=queued.state,
        reason=queued.reason,
        expected_start=queued.expected_start,
        nodes=queued.nodes,
        by=queued.by,
        said=description.what,
        fix=description.fix,
        silent=queued.unanswered,
        heard_s=queued.age_s,
        is_stuck=command_output.is_stuck(queued),
    )
    return replace(_merge_status(job, written, queued, plan), queue=queue_status)


def _merge_status(job: JobDir, written: Status | None, queued: QueueJob, plan: Callable[[], Plan]) -> Status:
    stage = queued.stage
    if written is not None and queued.unanswered and (written.written_s or 0.0) <= queued.age_s:
        return written  # it is newer
    if written is not None and (stage is not Stage.WAITING or written.state in status_file.ENDED):
        return written
    cancelled = _cancel_age_s(job) is not None
    if written is not None:
        has_reason = written.state == "QUEUED" and written.reason
        reason = written.reason if has_reason else what_and_fix(_describe(job, queued))
        state = "STOPPING" if cancelled else "QUEUED"
        return replace(status_file.clear_nodes(written), state=state, reason=reason)
    is_starting = stage in (Stage.RUNNING, Stage.LEAVING, Stage.UNKNOWN)
    state = "STOPPING" if cancelled else "STARTING" if is_starting else "QUEUED"
    return status_file.status_from_plan(plan(), state, _startup_reason(job, queued), time.time())


def _startup_reason(job: JobDir, queued: QueueJob) -> str:
    """Return the reason of a job whose supervisor has written no status yet."""
    match queued.stage:
        case Stage.WAITING:
            return what_and_fix(_describe(job, queued))
        case Stage.RUNNING | Stage.LEAVING | Stage.UNKNOWN:
            last_line = _last_batch_line(job)
            where = f" on {queued.nodes}" if queued.nodes else ""
            head = f"Slurm job {queued.id} is {queued.state}{where}, and its supervisor has not started yet"
            return f"{head}; last line of its batch script: {last_line}" if last_line else head
        case Stage.NO_ANSWER | Stage.OVER | Stage.NOT_FOUND:
            return what_and_fix(_describe(job, queued))


def _describe(job: JobDir, queued: QueueJob) -> Fault:
    """Describe Slurm's state of a job; for a cancelled job without the fix that would continue it."""
    description = command_output.describe_job(queued, job.id)
    return description if _cancel_age_s(job) is None else replace(description, fix="")


def _query_slurm(job: JobDir) -> QueueJob | None:
    """Return a job in Slurm's queue; None when Slurm was never given it."""
    job_id = latest_slurm_id(job)
    return _verify_job(job, QUEUE.query([job_id])[job_id]) if job_id is not None else None


def _verify_job(job: JobDir, queued: QueueJob) -> QueueJob:
    """Return Slurm's state of the job, or FORGOTTEN if its id now belongs to another job.

    A Slurm that has lost its state, or whose numbers have wrapped, gives ids again. Every batch script runs in its job's
    folder, though not on every machine by the same path. The Slurm of another cluster says nothing of this job.
    """
    if queued.stage is Stage.NO_ANSWER or PurePath(queued.folder).name == job.id:
        return queued
    own_cluster = _recorded_cluster(job)
    if own_cluster and (cluster := QUEUE.cluster_name()) != own_cluster:
        unanswered = f"it is in the queue of cluster {own_cluster}, but this machine's Slurm is "
        unanswered += f"cluster {cluster}" if cluster else "of another cluster without a name"
        return QueueJob(queued.id, "UNKNOWN", unanswered=unanswered)
    if not queued.folder:
        return queued
    reason = f"its id now belongs to a job in {queued.folder}"
    return QueueJob(
        queued.id, "FORGOTTEN", reason, folder=queued.folder, unanswered=queued.unanswered, age_s=queued.age_s,
        fix=f"orch resume {job.id}",
    )  # fmt: skip


def record_cluster(job: JobDir) -> None:
    """Record the cluster of a new job: other clusters, with other job ids, may see its folder."""
    if here := QUEUE.cluster_name():
        replace_text(job.queue, json.dumps({"cluster": here}))


def _recorded_cluster(job: JobDir) -> str:
    try:
        return str(codec.loads_plain(ownership.read_regular(job.queue))["cluster"])
    except (OSError, codec.CodecError, KeyError):
        return ""


# What follows from it


def _cancel_through_slurm(job: JobDir, err: ClusterError) -> ClusterError:
    """Cancel through Slurm a job to whose folder no request can be written; return the error to raise."""
    queued = _query_slurm(job)
    if queued is None or queued.unanswered or queued.stage is Stage.NOT_FOUND:
        answer = (
            (queued.unanswered or what_and_fix(command_output.describe_end(queued)))
            if queued
            else "the job was never submitted to Slurm"
        )
        return ClusterError(f"{err.what}; {answer}", err.where, err.fix)
    refusal = QUEUE.cancel(queued.id)
    if refusal:
        return ClusterError(f"{err.what}; scancel {queued.id}: {refusal}", err.where, err.fix)
    what = f"{err.what}, so the job was cancelled through Slurm: scancel {queued.id}"
    return ClusterError(what, err.where, f"free some space in {job.root}, then run orch status {job.id}")


def _last_batch_line(job: JobDir) -> str:
    return "".join(SlurmSource(job).batch_lines()[-1:])[:BATCH_LINE_CHARS_MAX]


def _end_reason(job: JobDir, queued: QueueJob) -> str:
    if queued.cause is AllocationEndCause.CANCELLED and _cancel_age_s(job) is not None:
        return "cancelled by the user"
    why = command_output.describe_end(queued)
    last_line = _last_batch_line(job) if queued.cause is AllocationEndCause.FAILED and not why.fix else ""
    return f"{why.what}; last line of its batch script: {last_line}" if last_line else what_and_fix(why)


def _enforce_cancel(job: JobDir, queued: QueueJob) -> None:
    """Cancel a job through Slurm that waits again, or whose supervisor has not stopped it in time."""
    cancel_age_s = _cancel_age_s(job)
    if cancel_age_s is None:
        return
    runs = queued.stage in (Stage.RUNNING, Stage.UNKNOWN)
    if queued.stage is Stage.WAITING or (runs and cancel_age_s > _cancel_s_max(job)):
        QUEUE.cancel(queued.id, again=True)


def _cancel_age_s(job: JobDir) -> float | None:
    """Return how long ago the last request was made, if it is a cancel; otherwise None."""
    request = requests.read_latest(job.requests)
    if request is None or request.action != "cancel":
        return None
    return max(0.0, file_age.now_s(job.requests) - request.written_s)


def _cancel_s_max(job: JobDir) -> float:
    try:
        written = status_file.read(job, time.time(), procfs.boot_id())
        grace_s = codec.loads(Plan, ownership.read_regular(job.plan)).limits.stop_grace_s
    except (OSError, ClusterError, codec.CodecError):
        return SILENT_CANCEL_S
    return SILENT_CANCEL_S if (written.written_s or 0.0) > SILENT_CANCEL_S else LIVING_CANCEL_S + grace_s


def _is_unchanged(job: JobDir) -> bool:
    """Tell whether no supervisor writes a job's status."""
    previous = _status_bytes(job)
    time.sleep(STILL_S)
    return _status_bytes(job) == previous


def _status_bytes(job: JobDir) -> bytes:
    try:
        return ownership.read_regular(job.state)
    except OSError:
        return b""
