"""Resume of an ended job in its own folder: planned again where its overrides change, then started or queued."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable, Iterator, Mapping

from orchestrator.core import codec
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import home, ownership, requests
from orchestrator.core.jobdir.durable import replace_bytes, replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.secret_mask import redact_url
from orchestrator.spec.load import load
from orchestrator.submission import credentials, render, submit_checks
from orchestrator.submission import sbatch as sbatch_submission
from orchestrator.submission.submit import copy_hosts_file, make_plan, redact_webhook
from orchestrator.submission.supervisor_process import start_supervisor

WorldSizeCheck = Callable[[int], object]
"""Called with the number of ranks of a resumed job; raises UserError if its checkpoint does not fit that number."""


@ownership.restricted_umask()
def resume(
    job: JobDir,
    old: Plan,
    checkpoint: int,
    overrides: tuple[str, ...],
    environ: Mapping[str, str],
    check_world_size: WorldSizeCheck,
) -> None:
    """Resume an ended job, with the plan `old`, in its own folder, from the checkpoint with this number, or the newest for 0.
    Raises OrchError, and then changes nothing."""
    if old.slurm is not None:
        _resume_in_queue(job, old, checkpoint, overrides, environ, check_world_size)
        return
    with _restore_on(job, (OrchError, OSError)):  # on Ctrl-C the supervisor may be running
        new = replan(job, old, overrides, environ) if overrides or _is_elsewhere(old) else old
        check_world_size(new.world_size)
        submit_checks.refuse_shared_checkpoints(new, environ, job.id)
        number = requests.send(job.requests, "resume", save=str(checkpoint))
        try:
            job.ended.unlink(missing_ok=True)
            job.cleaned_hosts.unlink(missing_ok=True)  # it will be on hosts again
            start_supervisor(job)
        except (OrchError, OSError):
            requests.withdraw(job.requests, number)  # or it would be resumed later without a command
            job.ended.touch()
            raise


@contextlib.contextmanager
def _restore_on(job: JobDir, faults: tuple[type[BaseException], ...]) -> Iterator[None]:
    """Restore the files that planning a job again changes, if the block fails with one of these."""
    files = (job.plan, job.overrides, job.webhook, job.cleaned_hosts, *job.scripts.glob("*"))
    kept = {file: (file.read_bytes(), file.stat().st_mode & 0o777) for file in files if file.exists()}
    written = {*job.root.glob("plan.*.json"), *job.scripts.glob("*")}
    try:
        yield
    except faults:
        for file, (data, mode) in kept.items():
            replace_bytes(file, data, mode=mode)
        for new in {*job.root.glob("plan.*.json"), *job.scripts.glob("*")} - written:
            new.unlink()
        raise


def _is_elsewhere(plan: Plan) -> bool:
    """Return whether a local job was planned on another machine, whose GPUs and Python were others."""
    return plan.backend == "local" and any(node.host != socket.gethostname() for node in plan.nodes)


def _resume_in_queue(
    job: JobDir,
    old: Plan,
    checkpoint: int,
    overrides: tuple[str, ...],
    environ: Mapping[str, str],
    check_world_size: WorldSizeCheck,
) -> None:
    """Queue an ended job again, under a new Slurm id. That id is written last: until then the batch script waits, and
    from then on nothing starts a supervisor in the nodes of the previous id."""
    sbatch_submission.require_commands(environ, job.id)
    earlier_ids = codec.loads(tuple[str, ...], job.slurm.read_bytes()) if job.slurm.exists() else ()
    with _restore_on(job, (BaseException,)):
        new = replan(job, old, overrides, environ) if overrides else old
        check_world_size(new.world_size)
        submit_checks.refuse_shared_checkpoints(new, environ, job.id)
        _write_scripts(new, job, job)  # they name its folder, which may have moved
        slurm_id = sbatch_submission.submit(job, environ, lambda key: f"{job.spec}: {key}")
    requests.send(job.requests, "resume", save=str(checkpoint))
    job.ended.unlink(missing_ok=True)
    home.record_origin(job, job.root)
    job.state.unlink(missing_ok=True)  # it describes the last end; from now on the queue says how the job is
    replace_text(job.slurm, json.dumps([*earlier_ids, slurm_id]))


def replan(job: JobDir, old: Plan, overrides: tuple[str, ...], environ: Mapping[str, str]) -> Plan:
    """Plan a job again from its own job file, with these overrides over those of its submit; return the new plan.

    Its code, id and secrets stay; the old plan is kept as `plan.N.json`. Raises OrchError, and then changes nothing.
    """
    submit_checks.refuse_ineffective_overrides(overrides)
    workdir = f"workdir={json.dumps(str(job.code))}"
    kept_hosts = [f"ssh.hosts_file={json.dumps(str(job.hosts_file))}"] if job.hosts_file.exists() else []
    file = load(job.spec, overrides=(*_overrides(job), *kept_hosts, *overrides, workdir))
    kept = {**environ, **dict.fromkeys(old.secrets, "")}
    new = make_plan(file, kept, old.id, old.created_at)
    if new.world_size > old.world_size:
        submit_checks.refuse_too_many_ranks(file, new)
    submit_checks.refuse_missing(file, new, environ)
    if (new.name, new.secrets, new.backend) != (old.name, old.secrets, old.backend):
        what = "a job's name, secrets and backend cannot change"
        raise UserError(what, "--set", "submit it as a new job instead")
    webhook, kept_webhook = file.spec.notify.url, job.webhook.read_text() if job.webhook.exists() else ""
    number = len(list(job.root.glob("plan.*.json"))) + 1
    replace_text(job.root / f"plan.{number}.json", codec.dumps(old))
    replace_text(job.plan, codec.dumps(new))
    replace_text(job.overrides, json.dumps(redact_webhook([*_overrides(job), *overrides], webhook)))
    if webhook and webhook != redact_url(kept_webhook):  # as it is kept in the earlier overrides
        replace_text(job.webhook, webhook, mode=credentials.PRIVATE_MODE)
    credentials.write_peer_credentials(job.secrets, new)
    if file.spec.ssh.hosts_file not in (None, str(job.hosts_file)) and new.ssh is not None:
        copy_hosts_file(job, file)
    _write_scripts(new, job, job)
    return new


def _write_scripts(plan: Plan, job: JobDir, to: JobDir) -> None:
    """Write the scripts of a job whose folder is `to` until it is moved to `job`. Raises UserError, OSError."""
    for script in render.render(plan, job, sys.executable):
        replace_text(to.scripts / script.name, script.text, mode=script.mode)


def _overrides(job: JobDir) -> list[str]:
    """Return the changes of `--set` and `--backend` up to now."""
    try:
        return list(codec.loads(tuple[str, ...], job.overrides.read_bytes()))
    except (OSError, codec.CodecError) as err:
        what = f"the list of overrides is missing or damaged: {err}"
        fix = "write the list of --set texts again, or []"
        raise ClusterError(what, str(job.overrides), fix) from err
