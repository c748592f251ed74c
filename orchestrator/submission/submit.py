"""Submission of a job: its folder is completed under another name, moved into place, then handed to a supervisor or to Slurm.

Rules: every possible refusal comes before a folder exists; a private file is private from its first byte; nothing secret
is in argv, scripts or the journal.

A submit with a key makes one job, however often it is repeated: `keys/KEY` in the job home names the job's id before its folder
is moved into place, and says `made` after that. So a submit that was interrupted in between is repeated, and a job that was
deleted later is not created again. The file is locked meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.host import host_health
from orchestrator.core.jobdir import home, locks, ownership, requests, start_folder
from orchestrator.core.jobdir.durable import replace_bytes, replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.secret_mask import redact_url
from orchestrator.core.slurm import queue, sbatch_options
from orchestrator.spec.load import SpecFile, load
from orchestrator.spec.yaml_document import resolve_path
from orchestrator.submission import bundle, credentials, planner, provenance, render, snapshot, submit_checks
from orchestrator.submission import sbatch as sbatch_submission
from orchestrator.submission.inventory import host_inventory, local_inventory
from orchestrator.submission.planner import Inventory
from orchestrator.submission.supervisor_process import start_supervisor

KEY_CHARS_MAX = 100
KEY_WAIT_S_MAX = 120.0
"""How long another submit with the same key is waited for."""

_MADE = "made"


def make_plan(file: SpecFile, environ: Mapping[str, str], job_id: str, wall_s: float) -> Plan:
    """Return the plan of a job. Raises UserError or ClusterError when it cannot be placed."""
    missing = [name for name in file.spec.secrets if name not in environ]
    if missing:
        what = f"{', '.join(missing)} listed in secrets, but not set in this environment"
        raise UserError(what, file.where("secrets"), f"export {missing[0]}=…, then submit again")
    match file.spec.backend:
        case "local":
            machines = local_inventory(environ, asks_gpus=file.spec.gpus_per_node is not None)
        case "ssh":
            failed = host_health.recent_failures(home.job_home(environ), time.time())
            machines = host_inventory(file, {host: one.describe_failure(wall_s) for host, one in failed.items()})
        case "slurm":
            options = sbatch_options.submitter_defaults(environ)
            machines = Inventory(socket.gethostname(), (), sys.executable, sbatch=options)
    plan = planner.plan_job(file, machines, job_id, wall_s)
    submit_checks.refuse_foreign_syntax(file, plan, environ)
    return plan


def render_scripts(
    spec: Path, backend: str | None, overrides: Sequence[str], environ: Mapping[str, str]
) -> tuple[render.RenderedFile, ...]:
    """Return the scripts that a submit would run, for a job that is never made. Raises OrchError."""
    file = load(spec, overrides=overrides, backend=backend)
    wall_s = time.time()
    plan = make_plan(file, environ, home.new_id(file.spec.name, wall_s), wall_s)
    return render.render(plan, JobDir(home.job_home(environ) / "jobs" / plan.id), sys.executable)


@ownership.restricted_umask()
def submit(
    file: SpecFile,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    *,
    oversubscribe: bool = False,
    key: SubmitKey | None = None,
) -> JobDir:
    """Make a job's folder and start its supervisor, or queue the job in Slurm. `overrides` are those that `file` was loaded
    with, kept for a later resume; `oversubscribe`: with any number of ranks a core; `key`: notes the job before it is there.
    Raises OrchError, and then leaves no job behind."""
    if file.spec.backend == "slurm":
        sbatch_submission.require_commands(environ, file.where("backend"))
    folder = home.job_home(environ)
    wall_s = time.time()
    plan = make_plan(file, environ, home.new_id(file.spec.name, wall_s), wall_s)
    if not oversubscribe:
        submit_checks.refuse_too_many_ranks(file, plan)
    submit_checks.refuse_missing(file, plan, environ)
    submit_checks.refuse_shared_checkpoints(plan, environ, file.where("checkpoint.path"))
    # A rank submits from the code of its job, in which no job home lies
    left_out = folder / "jobs" / f".{plan.id}" if file.workdir.is_relative_to(folder) else folder
    code = snapshot.plan_snapshot(file.workdir, file.spec.snapshot.limit_mb, left_out)
    if plan.ssh is not None:
        code = snapshot.add_synced(code, plan.ssh.sync, file.spec.snapshot.limit_mb, left_out)
    if key is not None:
        key.record(plan.id, made=False)
    job = _make_folder(folder, file, plan, code, environ, overrides)
    if plan.slurm is not None:
        _enqueue(job, environ, file.where)
    else:
        _start_job(job)
    if key is not None:
        key.record(plan.id, made=True)
    provenance.list_packages(job, plan.program)
    return job


def _start_job(job: JobDir) -> None:
    """Start a new job's supervisor. A job that could not be started is hidden: else the next command would start its
    supervisor, next to the job that was submitted in its place."""
    try:
        start_supervisor(job)
    except ClusterError as err:
        kept = JobDir(job.root.with_name(f".{job.id}"))  # it does not count as a job, and its log can be read
        job.root.rename(kept.root)
        raise ClusterError(err.what, str(kept.supervisor_log), err.fix) from err
    except KeyboardInterrupt:
        requests.send(job.requests, "cancel")  # the supervisor may be running already
        raise KeyboardInterrupt(f"{job.id} is cancelled") from None


def _enqueue(job: JobDir, environ: Mapping[str, str], where: sbatch_submission.Where) -> None:
    """Hand a new job to Slurm. When Slurm refuses it, its folder is deleted: no supervisor has been at work, so nothing in
    it is worth keeping; and a batch script that was queued after all finds no folder."""
    try:
        slurm_id = sbatch_submission.submit(job, environ, where)
        try:
            replace_text(job.slurm, json.dumps([slurm_id]))
        except OSError as err:
            queue.SlurmQueue(lambda: environ).cancel(slurm_id)
            fix = "free some space there, or fix its permissions"
            raise ClusterError(f"cannot be written: {err.strerror}", str(job.slurm), fix) from err
    except BaseException:
        shutil.rmtree(job.root, ignore_errors=True)
        raise


def _make_folder(
    folder: Path,
    file: SpecFile,
    plan: Plan,
    code: snapshot.CodeSnapshot,
    environ: Mapping[str, str],
    overrides: Sequence[str],
) -> JobDir:
    """Make the whole folder under another name, and move it into place."""
    place = JobDir(folder / "jobs" / plan.id)
    draft = JobDir(folder / "jobs" / f".{plan.id}")
    try:
        draft.root.mkdir(parents=True)
        home.require_own_job(draft)
        snapshot.copy_files(code, draft.code)
        webhook = file.spec.notify.url
        name = Path(os.path.relpath(os.path.realpath(file.path), os.path.realpath(file.workdir)))
        if webhook and name in code.copies and not (draft.code / name).is_symlink():
            (draft.code / name).chmod(credentials.PRIVATE_MODE)
        start_folder.record_snapshot_files(draft, code.copies)
        if plan.ssh is not None:
            snapshot.write_archive(code, draft.code, draft.archive)
            copy_hosts_file(draft, file)
        for path in (draft.checkpoints, draft.logs, draft.requests, draft.scripts, draft.root / "nodes"):
            path.mkdir()
        replace_text(draft.spec, file.text, mode=credentials.PRIVATE_MODE if webhook else 0o644, durable=False)
        replace_text(draft.overrides, json.dumps(redact_webhook(overrides, webhook)), durable=False)
        home.record_origin(draft, place.root)
        replace_text(draft.plan, codec.dumps(plan), durable=False)
        for script in render.render(plan, place, sys.executable):
            replace_text(draft.scripts / script.name, script.text, mode=script.mode, durable=False)
        replace_bytes(draft.bundle, bundle.build(folder), durable=False)
        credentials.write_credentials(draft.secrets, plan, environ, webhook)
        provenance.record(draft, file.workdir)
        draft.root.rename(place.root)
    except OSError as err:
        shutil.rmtree(draft.root, ignore_errors=True)
        what = f"the job folder cannot be made: {err.strerror or err}"
        fix = "free some space there, fix its permissions, or set ORCH_HOME to another folder"
        raise ClusterError(what, str(err.filename2 or err.filename or folder), fix) from err
    except BaseException:
        shutil.rmtree(draft.root, ignore_errors=True)
        raise
    return place


def copy_hosts_file(job: JobDir, file: SpecFile) -> None:
    """Copy the file that names the hosts: a later resume reads it again, even when the user's own is gone."""
    named = file.spec.ssh.hosts_file
    if named is not None:
        shutil.copyfile(resolve_path(file.folder, named), job.hosts_file)


def redact_webhook(overrides: Sequence[str], webhook: str | None) -> list[str]:
    """Return overrides as they are kept: with the host alone of a webhook's address, which may hold a token."""
    return [text.replace(webhook, redact_url(webhook)) if webhook else text for text in overrides]


# Keys


@dataclass(frozen=True, slots=True)
class SubmitKey:
    """A key that this process alone submits with."""

    key: str
    folder: Path
    fd: int

    def job(self) -> JobDir | None:
        """Return the job that was submitted with the key. Raises UserError when that job was deleted."""
        job_id, _, made = os.pread(self.fd, 1000, 0).decode(errors="replace").strip().partition(" ")
        if not job_id:
            return None
        job = JobDir(self.folder / "jobs" / job_id)
        if job.root.exists():
            self.record(job_id, made=True)
            return job
        if made == _MADE:
            what = f"the job of this key, {job_id}, was deleted"
            raise UserError(what, f"--key {self.key}", "choose another key for another job")
        return None

    def record(self, job_id: str, *, made: bool) -> None:
        """Write down the job of the key: before its folder is moved into place, and after that."""
        text = f"{job_id} {_MADE if made else ''}\n".encode()
        os.pwrite(self.fd, text, 0)
        os.ftruncate(self.fd, len(text))
        os.fsync(self.fd)


@contextlib.contextmanager
def hold_key(folder: Path, key: str) -> Iterator[SubmitKey]:
    """Hold a key of a job home. Raises UserError for one that is no name of a file, and ClusterError when another submit
    holds it for too long."""
    if not re.fullmatch(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{KEY_CHARS_MAX - 1}}}", key):
        fix = f"use 1 to {KEY_CHARS_MAX} letters, digits, dots, dashes and underscores, no dash or dot first"
        raise UserError(f"{key[:KEY_CHARS_MAX]!r} is not a valid key", "--key", fix)
    path = folder / "keys" / key
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = locks.open_file(path)
    except OSError as err:
        raise ClusterError(f"cannot be written: {err.strerror}", str(path), "fix that folder") from err
    try:
        if not locks.acquire(fd, KEY_WAIT_S_MAX):
            what = f"another submit with this key has been running for {KEY_WAIT_S_MAX:.0f} s"
            raise ClusterError(what, str(path), "orch status --all shows whether its job is there")
        yield SubmitKey(key, folder, fd)
    finally:
        os.close(fd)
