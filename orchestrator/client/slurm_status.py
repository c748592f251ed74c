"""How is a job whose nodes a queue system gives? What its folder says and what Slurm says, put together.

Rules: while a supervisor lives, the folder is right; while none does, Slurm is. A job is closed from here only when
Slurm says that it is over for good; where it knows no such job, only when nothing in the folder moves any more and
scontrol says so after squeue. Then a request tells so, and a supervisor without nodes, on this machine, learns it and
ends the job. Who cannot write to the folder only reads. What Slurm does not answer is never taken for a no.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import PurePath

from orchestrator.client import secret_mask, slurm_close
from orchestrator.core import codec
from orchestrator.core.end_cause import Cause
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import home, ownership, requests, status_file
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import QueueStatus, Status
from orchestrator.core.slurm import command_output
from orchestrator.core.slurm.command_output import QueueJob
from orchestrator.core.slurm.job_states import Stage
from orchestrator.core.slurm.queue import SlurmQueue, is_over

QUEUE = SlurmQueue()
"""What this process knows of Slurm's queue: all its jobs share the looks."""

HANDED_S_MAX = 300.0
"""How long a submit may take to hand a job to Slurm; one that has not by then was cut off."""

STILL_S = 1.5
"""A living supervisor writes its status every half second; one that does not for so long is not there."""

SILENT_CANCEL_S = 30.0
"""How long a supervisor that says nothing has to stop a cancelled job, before Slurm is asked to."""

LIVING_CANCEL_S = 60.0
"""The same for one that does, beside the grace that ranks have."""

ORPHANED_S = 60.0
"""How long a supervisor must have said nothing before its job is taken for one that has none: its agents come first."""

WORDS_CHARS_MAX = 300
WORDS_BYTES_MAX = 64 << 10


def present(job: JobDir) -> str | None:
    """Return Slurm's id of a job, the latest; None when Slurm was never given it. Raises ClusterError."""
    try:
        ids = codec.loads(tuple[str, ...], ownership.read_regular(job.slurm))
    except FileNotFoundError:
        return None
    except (OSError, codec.CodecError) as err:
        raise ClusterError(f"Slurm's ids of the job cannot be read: {err}", str(job.slurm), _IDS_FIX) from err
    if not all(one.isdigit() for one in ids):
        raise ClusterError("Slurm's ids of the job are damaged", str(job.slurm), _IDS_FIX)
    return ids[-1] if ids else None


_IDS_FIX = 'write the list of its ids anew, the latest last: ["1234"]; squeue or sacct show them'


def query_ahead(jobs: Iterable[JobDir]) -> None:
    """Ask Slurm for all these jobs at once, so that the statuses which follow ask for none."""
    ids = []
    for job in jobs:
        with contextlib.suppress(ClusterError):
            job_id = present(job)
            ids += [job_id] if job_id else []
    if ids:
        QUEUE.look(ids)


# The status


def join(job: JobDir, known: Status | None, plan: Callable[[], Plan]) -> Status:
    """Return a job's status with what Slurm says of it. `known`: what its supervisor has said, if any. Raises
    ClusterError when its folder is damaged."""
    told = _told(job)
    if told is None:
        return known or status_file.unknown(plan(), "QUEUED", "it is being handed to Slurm", time.time())
    shown: QueueStatus = {
        "id": told.id,
        "state": told.state,
        "reason": told.reason,
        "expected_start": told.expected_start,
        "nodes": told.nodes,
        "by": told.by,
        "said": _say(job, told),
        "silent": told.unanswered,
        "heard_s": told.age_s,
    }
    return {**_joined(job, known, told, plan), "queue": shown}


def _joined(job: JobDir, known: Status | None, told: QueueJob, plan: Callable[[], Plan]) -> Status:
    stage = told.stage
    if known is not None and told.unanswered and known.get("written_s", 0.0) <= told.age_s:
        return known  # its word is the later one
    if known is not None and (stage is not Stage.WAITING or known["state"] in status_file.ENDED):
        return known
    cancelled = _cancel_age_s(job) is not None
    if known is not None:
        is_told = known["state"] == "QUEUED" and known["reason"]
        reason = known["reason"] if is_told else _say(job, told)
        state = "STOPPING" if cancelled else "QUEUED"
        return {**status_file.without_nodes(known), "state": state, "reason": reason}
    begins = stage in (Stage.RUNNING, Stage.LEAVING, Stage.UNKNOWN)
    state = "STOPPING" if cancelled else "STARTING" if begins else "QUEUED"
    return status_file.unknown(plan(), state, _beginning(job, told), time.time())


def _beginning(job: JobDir, told: QueueJob) -> str:
    """Say how it stands with a job that no supervisor has said anything of."""
    match told.stage:
        case Stage.WAITING:
            return _say(job, told)
        case Stage.RUNNING | Stage.LEAVING | Stage.UNKNOWN:
            said = _batch_words(job)
            where = f" on {told.nodes}" if told.nodes else ""
            head = f"Slurm job {told.id} is {told.state}{where}, and its supervisor has not come up yet"
            return f"{head}; its batch script says: {said}" if said else head
        case Stage.NO_ANSWER | Stage.OVER | Stage.NOT_FOUND:
            return _say(job, told)


def _say(job: JobDir, told: QueueJob) -> str:
    """Say what Slurm does with a job; of one that is cancelled not what would let it go on."""
    said = command_output.say(told, job.id)
    return said if _cancel_age_s(job) is None else said.partition("; fix: ")[0]


def _told(job: JobDir) -> QueueJob | None:
    """Return what Slurm says of a job; None when it was never given it."""
    job_id = present(job)
    return _remembered(job, _of_this(job, QUEUE.look([job_id])[job_id])) if job_id is not None else None


def _of_this(job: JobDir, told: QueueJob) -> QueueJob:
    """Return what Slurm says of the job, or that it has lost it where the id is another's by now: a Slurm that has lost
    its memory, or whose numbers have come round, gives ids again. Every batch script runs in its job's folder, though
    not on every machine by the same path. Of a job that it does not know to be this one, the Slurm of another cluster
    says nothing."""
    if told.stage is Stage.NO_ANSWER or PurePath(told.folder).name == job.id:
        return told
    at_home = _home_cluster(job)
    if at_home and (here := QUEUE.cluster_name()) != at_home:
        silent = f"it is in the queue of cluster {at_home}, and this machine's Slurm is "
        silent += f"cluster {here}" if here else "of a cluster that it does not name"
        return QueueJob(told.id, "UNKNOWN", unanswered=silent)
    if not told.folder:
        return told
    reason = f"its id is now that of a job in {told.folder}; fix: orch resume {job.id}"
    return replace(
        QueueJob(told.id, "FORGOTTEN", reason, folder=told.folder),
        unanswered=told.unanswered,
        age_s=told.age_s,
    )


def _remembered(job: JobDir, told: QueueJob) -> QueueJob:
    """Keep in the job's folder what Slurm says, for when it does not answer; then return what it said last, and its age."""
    if told.state == "UNKNOWN":
        with contextlib.suppress(OSError, codec.CodecError):
            last = codec.loads(QueueJob, ownership.read_regular(job.queue_said))
            age_s = round(max(0.0, time.time() - job.queue_said.stat().st_mtime), 1)
            return replace(last, unanswered=told.unanswered, age_s=age_s) if last.id == told.id else told
    elif (
        not told.unanswered and home.is_ours(job) and not job.ended.exists() and not ownership.fault(job.root)
    ):
        with contextlib.suppress(OSError):
            if job.queue_said.exists() and job.queue_said.stat().st_mtime >= time.time() - told.age_s:
                return told  # it was kept when it was heard
            replace_text(job.queue_said, json.dumps(asdict(replace(told, age_s=0.0))), durable=False)
    return told


def note_cluster(job: JobDir) -> None:
    """Keep of which cluster a new job is: its folder may be seen from others, whose ids are not its."""
    if here := QUEUE.cluster_name():
        replace_text(job.queue, json.dumps({"cluster": here}))


def _home_cluster(job: JobDir) -> str:
    try:
        return str(codec.loads_plain(ownership.read_regular(job.queue))["cluster"])
    except (OSError, codec.CodecError, KeyError):
        return ""


# What follows from it


def settle(job: JobDir) -> None:
    """Do what Slurm's word asks for: close a job that is over, see to a cancel that nobody has carried out, and bring one
    back into the queue that has lost its supervisor for good.

    Raises ClusterError when that cannot be done.
    """
    if job.ended.exists() or not home.is_ours(job):
        return
    told = _told(job)
    if told is None:
        if time.time() - job.plan.stat().st_mtime > HANDED_S_MAX:
            why = "its submit was cut off before Slurm had it; fix: submit it again"
            slurm_close.close(job, "", Cause.FAILED, why)
        return
    if told.unanswered:
        return
    if not is_over(told):
        _pursue_cancel(job, told)
        _bring_back(job, told)
    elif told.stage is Stage.OVER or _is_still(job):
        told = _of_this(job, QUEUE.confirmed(told))
        if is_over(told) and not told.unanswered:
            stay = told.id if told.restarts is None else f"{told.id}.{told.restarts}"
            slurm_close.close(job, stay, told.cause, _end_words(job, told))


def require_over(job: JobDir) -> None:
    """Raise ClusterError unless Slurm says that the job has left its nodes, or was never given it."""
    told = _told(job)
    if told is not None and (told.unanswered or not is_over(told)):
        fix = f"scancel {told.id}, and try again once it is over"
        raise ClusterError(
            told.unanswered or command_output.say(told, job.id).partition("; fix: ")[0], job.id, fix
        )


def cancel(job: JobDir) -> None:
    """Ask for a job's end: of Slurm, while it waits in the queue, else of its supervisor. Raises ClusterError when
    Slurm refuses, and UserError for another user's job."""
    try:
        requests.ask(job.requests, "cancel")
    except ClusterError as err:
        raise _cancelled_by_slurm(job, err) from err
    QUEUE.expect_news()
    told = _told(job)
    if told is not None and not told.unanswered and told.stage is Stage.WAITING:
        refusal = QUEUE.cancel(told.id)
        if refusal:
            fix = f"once Slurm answers: orch cancel {job.id} again, or scancel {told.id}"
            raise ClusterError(f"scancel {told.id}: {refusal}", job.id, fix)
    settle(job)


def _cancelled_by_slurm(job: JobDir, err: ClusterError) -> ClusterError:
    """Let Slurm end a job whose supervisor cannot be asked to, since the disk refuses; return what to say of that."""
    told = _told(job)
    if told is None or told.unanswered or told.stage is Stage.NOT_FOUND:
        said = (told.unanswered or command_output.ended(told)) if told else "Slurm was never given the job"
        return ClusterError(f"{err.what}; {said}", err.where, err.fix)
    refusal = QUEUE.cancel(told.id)
    if refusal:
        return ClusterError(f"{err.what}; scancel {told.id}: {refusal}", err.where, err.fix)
    what = f"{err.what}, so Slurm was told to end the job: scancel {told.id}"
    return ClusterError(what, err.where, f"make room in {job.root}, then see with orch status {job.id}")


def begin_again(job: JobDir, before: Status) -> None:
    """Write that a resumed job waits: until it has nodes nobody else does, and its last end must not show any more."""
    bare, now = status_file.without_nodes(before), status_file.iso(time.time())
    status: Status = {**bare, "state": "QUEUED", "reason": "", "ended_at": None, "written_at": now}
    replace_text(job.state, json.dumps(status), durable=False)
    QUEUE.expect_news()


def batch_lines(job: JobDir) -> list[str]:
    """Return what a job's batch script has printed, its end where it is long, with the secrets masked."""
    try:
        with os.fdopen(ownership.open_inside(job.batch_log), "rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size - WORDS_BYTES_MAX)
            file.seek(begin)
            text = file.read(WORDS_BYTES_MAX).decode(errors="replace")
        lines = secret_mask.of_job(job).apply(text).splitlines()
    except OSError:
        return []
    except ValueError:
        return ["(not shown: the job's secrets are damaged, so nothing could be masked)"]
    if begin:
        del lines[0]  # its head is cut off, maybe in the middle of a secret's character
    return [line.rstrip() for line in lines if line.strip()]


def _batch_words(job: JobDir) -> str:
    return "".join(batch_lines(job)[-1:])[:WORDS_CHARS_MAX]


def _end_words(job: JobDir, told: QueueJob) -> str:
    if told.cause is Cause.CANCELLED and _cancel_age_s(job) is not None:
        return "cancelled by the user"
    why = command_output.ended(told)
    said = _batch_words(job) if told.cause is Cause.FAILED and "; fix: " not in why else ""
    return f"{why}; the last words of its batch script: {said}" if said else why


def _pursue_cancel(job: JobDir, told: QueueJob) -> None:
    """Take a cancelled job from Slurm that waits again, or whose supervisor has not stopped it in time."""
    asked_s = _cancel_age_s(job)
    if asked_s is None:
        return
    is_there = told.stage in (Stage.RUNNING, Stage.UNKNOWN)
    if told.stage is Stage.WAITING or (is_there and asked_s > _cancel_s_max(job)):
        QUEUE.cancel(told.id, again=True)


def _bring_back(job: JobDir, told: QueueJob) -> None:
    """Requeue a job that runs on without its batch script: where no agent is left to do it, see `node/orphan.py`, nobody
    else does. Raises ClusterError when Slurm refuses."""
    is_alone = told.stage is Stage.RUNNING and _silent_s(job) > ORPHANED_S and _cancel_age_s(job) is None
    if is_alone and (refusal := QUEUE.bring_back(told.id)):
        fix = f"scontrol requeue {told.id}, or scancel {told.id} and orch resume {job.id}"
        raise ClusterError(refusal, job.id, fix)


def _silent_s(job: JobDir) -> float:
    """Return how long ago a supervisor wrote the status; where none has, since when Slurm has the job."""
    for path in (job.state, job.slurm):
        with contextlib.suppress(OSError):
            return time.time() - path.stat().st_mtime
    return 0.0


def _cancel_age_s(job: JobDir) -> float | None:
    """Return how long ago a cancel was asked for that nothing has followed; None when there is none."""
    try:
        path = max((one for one in job.requests.glob("*.json") if requests.number_of(one)), default=None)
        if path is None or codec.loads_plain(ownership.read_regular(path)).get("ask") != "cancel":
            return None
        return max(0.0, time.time() - path.stat().st_mtime)
    except (OSError, codec.CodecError):
        return None


def _cancel_s_max(job: JobDir) -> float:
    """Return how long a job's supervisor has to stop it."""
    try:
        known = status_file.read(job, time.time())
        grace_s = codec.loads(Plan, ownership.read_regular(job.plan)).limits.stop_grace_s
    except (OSError, ClusterError, codec.CodecError):
        return SILENT_CANCEL_S
    return SILENT_CANCEL_S if known.get("written_s", 0.0) > SILENT_CANCEL_S else LIVING_CANCEL_S + grace_s


def _is_still(job: JobDir) -> bool:
    """Tell whether nobody writes a job's status."""
    before = _bytes(job)
    time.sleep(STILL_S)
    return _bytes(job) == before


def _bytes(job: JobDir) -> bytes:
    try:
        return ownership.read_regular(job.state)
    except OSError:
        return b""
