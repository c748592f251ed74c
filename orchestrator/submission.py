"""Start of a job: its folder is made whole under another name, then moved into place, then handed over.

Rules: everything that can be refused is refused before a folder exists; a private file is private from its first byte;
nothing secret is in argv, scripts or the journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator import (
    bundle,
    credentials,
    home,
    planning,
    provenance,
    refusals,
    render,
    requests,
    salvage,
    sbatch,
    snapshot,
)
from orchestrator.errors import ClusterError, UserError, with_fix
from orchestrator.plan import Plan
from orchestrator.planning import Inventory
from orchestrator.slurm import queue, submitting
from orchestrator.spec import SpecFile, load
from orchestrator.specfile import path_in
from orchestrator.wire import codec, ownership
from orchestrator.wire.durable import replace_bytes, replace_text
from orchestrator.wire.mask import host_alone
from orchestrator.wire.paths import JobDir

GPU_LIST_S_MAX = 20.0


def inventory(environ: Mapping[str, str]) -> Inventory:
    """Return what this machine has for jobs. Raises ClusterError when its GPUs cannot be listed."""
    return Inventory(socket.gethostname(), _gpus(environ), sys.executable)


def _inventory_of_hosts(file: SpecFile) -> Inventory:
    """Return what the hosts have, asking them only for what the spec leaves open. Raises OrchError."""
    from orchestrator import fleet

    gpus: int | None = None
    if planning.asks_hosts(file):
        names = [host.name for host in file.hosts]
        gpus = fleet.gpus_each(names, planning.ssh_of(file.spec), file.where("gpus_per_node"))
    return Inventory(socket.gethostname(), (), sys.executable, gpus)


def _gpus(environ: Mapping[str, str]) -> tuple[int, ...]:
    """List this machine's GPUs by nvidia-smi, or those of them that CUDA_VISIBLE_DEVICES leaves to the submitter."""
    tool = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if tool is None:
        return ()
    try:
        done = subprocess.run(
            [tool, "--query-gpu=index,uuid", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=GPU_LIST_S_MAX, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ClusterError(
            "nvidia-smi does not answer", tool, "see why with nvidia-smi, or use procs_per_node"
        ) from err
    if done.returncode != 0:
        return ()
    rows = [line.split(",") for line in done.stdout.splitlines()]
    found = {row[1].strip(): int(row[0]) for row in rows if len(row) == 2 and row[0].strip().isdigit()}
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(found.values()) if visible is None else _visible(visible, found)


def _visible(variable: str, found: Mapping[str, int]) -> tuple[int, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by index or by the beginning of a UUID, in its order.

    As CUDA does it, an empty word or -1 ends the list. Raises ClusterError for a GPU that is not there.
    """
    chosen: list[int] = []
    for word in map(str.strip, variable.split(",")):
        if word in ("", "-1"):
            break
        named = [
            gpu
            for uuid, gpu in found.items()
            if word == str(gpu) or (word[:4] == "GPU-" and uuid.startswith(word))
        ]
        if len(named) != 1:
            what = f"{word} is none of the {len(found)} GPUs that nvidia-smi lists"
            raise ClusterError(what, f"CUDA_VISIBLE_DEVICES={variable}", "name whole GPUs there, or unset it")
        chosen += named
    return tuple(dict.fromkeys(chosen))


def make_plan(file: SpecFile, environ: Mapping[str, str], job_id: str, wall_s: float) -> Plan:
    """Return the plan of a job. Raises UserError or ClusterError when it cannot be placed."""
    missing = [name for name in file.spec.secrets if name not in environ]
    if missing:
        what = f"{', '.join(missing)} named in secrets, and not set in this environment"
        raise UserError(what, file.where("secrets"), f"export {missing[0]}=…, then submit again")
    match file.spec.backend:
        case "local":
            there = inventory(environ)
        case "ssh":
            there = _inventory_of_hosts(file)
        case "slurm":
            there = Inventory(socket.gethostname(), (), sys.executable, sbatch=sbatch.defaults(environ))
    return planning.make(file, there, job_id, wall_s)


def rendered(
    spec: Path, backend: str | None, overrides: Sequence[str], environ: Mapping[str, str]
) -> tuple[render.RenderedFile, ...]:
    """Return the scripts that a submit would run, for a job that is never made. Raises OrchError."""
    file = load(spec, overrides=overrides, backend=backend)
    wall_s = time.time()
    made = make_plan(file, environ, home.new_id(file.spec.name, wall_s), wall_s)
    return render.render(made, JobDir(home.home(environ) / "jobs" / made.id), sys.executable)


@ownership.closed_to_others()
def submit(file: SpecFile, environ: Mapping[str, str], overrides: Sequence[str] = ()) -> JobDir:
    """Make a job's folder and start its supervisor, or queue it where Slurm will. `overrides` are those that `file` was
    loaded with, kept for a later resume. Raises OrchError, and then leaves no job behind."""
    if file.spec.backend == "slurm":
        submitting.require_commands(environ, file.where("backend"))
    folder = home.home(environ)
    wall_s = time.time()
    made = make_plan(file, environ, home.new_id(file.spec.name, wall_s), wall_s)
    refusals.refuse_missing(file, made, environ)
    code = snapshot.survey(file.workdir, file.spec.snapshot.limit_mb, folder)
    if made.ssh is not None:
        from orchestrator import fleet

        code = snapshot.with_sync(code, made.ssh.sync, file.spec.snapshot.limit_mb, folder)
        fleet.refuse_locked_keys([node.host for node in made.nodes], made.ssh)
    job = _fill(folder, file, made, code, environ, overrides)
    if made.slurm is not None:
        _enqueue(job, environ, file.where)
    else:
        _begin(job)
    provenance.list_packages(job, made.program)
    return job


def _begin(job: JobDir) -> None:
    """Start a new job's supervisor. A job that was not begun must not begin later by itself: the next command would
    start a supervisor for it, beside the job that was submitted in its place."""
    try:
        start_supervisor(job)
    except ClusterError as err:
        kept = JobDir(job.root.with_name(f".{job.id}"))  # no job any more, and its log can be read
        job.root.rename(kept.root)
        raise ClusterError(err.what, str(kept.supervisor_log), err.fix) from err
    except KeyboardInterrupt:
        requests.ask(job.requests, "cancel")  # the supervisor may be at work already
        raise


def _enqueue(job: JobDir, environ: Mapping[str, str], where: submitting.Where) -> None:
    """Hand a new job to Slurm. One that Slurm does not take is none: no supervisor has been at work, so nothing in its
    folder is worth keeping; and what sbatch may have queued after all finds no folder."""
    try:
        slurm_id = submitting.submit(job, environ, where)
        try:
            replace_text(job.slurm, json.dumps([slurm_id]))
        except OSError as err:
            queue.Queue(lambda: environ).cancel(slurm_id)
            fix = "free some space or permissions there"
            raise ClusterError(f"cannot be written: {err.strerror}", str(job.slurm), fix) from err
    except BaseException:
        shutil.rmtree(job.root, ignore_errors=True)
        raise


def _fill(
    folder: Path,
    file: SpecFile,
    made: Plan,
    code: snapshot.Snapshot,
    environ: Mapping[str, str],
    overrides: Sequence[str],
) -> JobDir:
    """Make the whole folder beside its place, and move it there."""
    place = JobDir(folder / "jobs" / made.id)
    draft = JobDir(folder / "jobs" / f".{made.id}")
    try:
        draft.root.mkdir(parents=True)
        home.require_ours(draft)
        snapshot.take(code, draft.code)
        if made.ssh is not None:
            snapshot.pack(code, draft.code, draft.archive)
            _keep_hosts_file(draft, file)
        for path in (draft.checkpoints, draft.logs, draft.requests, draft.scripts, draft.root / "nodes"):
            path.mkdir()
        webhook = file.spec.notify.url
        replace_text(draft.spec, file.text, mode=credentials.PRIVATE if webhook else 0o644, durable=False)
        replace_text(draft.overrides, json.dumps(_hosts_alone(overrides, webhook)), durable=False)
        replace_text(draft.plan, codec.dumps(made), durable=False)
        for script in render.render(made, place, sys.executable):
            replace_text(draft.scripts / script.name, script.text, mode=script.mode, durable=False)
        replace_bytes(draft.bundle, bundle.build(folder), durable=False)
        credentials.fill(draft.secrets, made, environ, webhook)
        provenance.record(draft, file.workdir)
        draft.root.rename(place.root)
    except OSError as err:
        shutil.rmtree(draft.root, ignore_errors=True)
        fix = "free some space or permissions there, or set ORCH_HOME to another place"
        raise ClusterError(
            f"the job folder cannot be made: {err.strerror}",
            str(err.filename2 or err.filename or folder),
            fix,
        ) from err
    except BaseException:
        shutil.rmtree(draft.root, ignore_errors=True)
        raise
    return place


def _keep_hosts_file(job: JobDir, file: SpecFile) -> None:
    """Copy the file that names the hosts: a later resume reads it again, wherever the user's has gone."""
    named = file.spec.ssh.hosts_file
    if named is not None:
        shutil.copyfile(path_in(file.folder, named), job.hosts_file)


SUPERVISOR_ENV = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
SSH_ENV = ("SSH_AUTH_SOCK",)
"""What a supervisor needs of the environment, and what one that uses SSH needs beside."""

START_S_MAX = 30.0


@ownership.closed_to_others()
def start_supervisor(job: JobDir) -> None:
    """Start the job's supervisor under its guard, detached, and wait until it listens. Raises ClusterError when it does
    not come up, and UserError for a job that is not this user's alone."""
    home.require_ours(job)
    over_ssh = _is_over_ssh(job)
    names = (*SUPERVISOR_ENV, *SSH_ENV) if over_ssh else SUPERVISOR_ENV
    env = {name: os.environ[name] for name in names if name in os.environ}
    alone = () if over_ssh else ("-I", "-S")  # paramiko comes from site-packages; all else is in the bundle
    with contextlib.suppress(
        OSError, codec.CodecError
    ):  # what is wrong with a damaged plan its supervisor says
        salvage.require_journal(job, codec.loads(Plan, job.plan.read_bytes()))
    started_ns = time.time_ns()
    with job.supervisor_log.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, *alone, str(job.bundle), "guard", str(job.root)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=job.root, start_new_session=True,
        )  # fmt: skip
    deadline_s = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline_s:
        if _written_since(job.endpoint, started_ns) or process.poll() == 0:
            return
        if process.returncode is not None:
            break
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # one that comes up later would act for a job that is given up
    process.wait()
    with job.supervisor_log.open("rb") as log:
        log.seek(log_start)
        said = log.read().decode(errors="replace").strip().splitlines()
    why, fix = with_fix(said[-1] if said else "no word from it")
    raise ClusterError(
        f"the supervisor did not come up: {why}", str(job.supervisor_log), fix or "read that file"
    )


def _is_over_ssh(job: JobDir) -> bool:
    """Tell whether a job uses SSH; what is wrong with a damaged plan its supervisor says."""
    try:
        return bool(codec.loads_plain(ownership.read_regular(job.plan))["backend"] == "ssh")
    except (OSError, codec.CodecError, KeyError):
        return False


def _written_since(path: Path, time_ns: int) -> bool:
    try:
        return (
            path.stat().st_mtime_ns >= time_ns - 20_000_000
        )  # file times come from a clock that ticks every 4-10 ms
    except OSError:
        return False


@ownership.closed_to_others()
def resume(
    job: JobDir, old: Plan, checkpoint: str, overrides: tuple[str, ...], environ: Mapping[str, str]
) -> None:
    """Let an ended job, with the plan `old`, go on in its own folder. Raises OrchError, and then changes nothing."""
    path = str(refusals.existing(job, checkpoint, old.checkpoint_glob)) if checkpoint else ""
    if old.slurm is not None:
        _resume_in_queue(job, old, path, overrides, environ)
        return
    if overrides:
        replan(job, old, overrides, environ)
    requests.ask(job.requests, "resume", path=path)
    job.ended.unlink(missing_ok=True)
    job.swept.unlink(missing_ok=True)  # it will be on hosts again
    start_supervisor(job)


def _resume_in_queue(
    job: JobDir, old: Plan, path: str, overrides: tuple[str, ...], environ: Mapping[str, str]
) -> None:
    """Queue an ended job again, under another id of Slurm's. That id is written last: until then the batch script
    waits, and from then on nothing starts a supervisor in the nodes of the id before."""
    submitting.require_commands(environ, job.id)
    before = codec.loads(tuple[str, ...], job.slurm.read_bytes()) if job.slurm.exists() else ()
    private = [job.webhook] if job.webhook.exists() else []
    files = (job.plan, job.overrides, *private, *sorted(job.scripts.iterdir()))
    kept = {file: file.read_bytes() for file in files}
    plans = set(job.root.glob("plan.*.json"))
    if overrides:
        replan(job, old, overrides, environ)
    try:
        slurm_id = submitting.submit(job, environ, lambda key: f"{job.spec}: {key}")
    except BaseException:
        for file, data in kept.items():
            replace_bytes(file, data, mode=file.stat().st_mode & 0o777)
        for new in sorted(set(job.root.glob("plan.*.json")) - plans):
            new.unlink()
        raise
    requests.ask(job.requests, "resume", path=path)
    job.ended.unlink(missing_ok=True)
    job.state.unlink(missing_ok=True)  # it tells of the last end; the queue tells how the job is from now on
    replace_text(job.slurm, json.dumps([*before, slurm_id]))


def replan(job: JobDir, old: Plan, overrides: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Plan a job anew from its own spec, with these overrides over those of its submit.

    Its code, id and secrets stay; the old plan is kept beside. Raises OrchError, and then changes nothing.
    """
    refusals.refuse_vain(overrides)
    workdir = f"workdir={json.dumps(str(job.code))}"
    kept_hosts = [f"ssh.hosts_file={json.dumps(str(job.hosts_file))}"] if job.hosts_file.exists() else []
    all_overrides = [*_overrides(job), *overrides]
    file = load(job.spec, overrides=(*_overrides(job), *kept_hosts, *overrides, workdir))
    kept = {**environ, **dict.fromkeys(old.secrets, "")}
    new = make_plan(file, kept, old.id, old.created_at)
    refusals.refuse_missing(file, new, environ)
    if (new.name, new.secrets, new.backend) != (old.name, old.secrets, old.backend):
        what = "a job's name, secrets and backend cannot change"
        raise UserError(what, "--set", "submit it as a new job instead")
    webhook, kept_webhook = file.spec.notify.url, job.webhook.read_text() if job.webhook.exists() else ""
    number = len(list(job.root.glob("plan.*.json"))) + 1
    replace_text(job.root / f"plan.{number}.json", codec.dumps(old))
    replace_text(job.plan, codec.dumps(new))
    replace_text(job.overrides, json.dumps(_hosts_alone(all_overrides, webhook)))
    if webhook and webhook != host_alone(kept_webhook):  # as it stands in the overrides of before
        replace_text(job.webhook, webhook, mode=credentials.PRIVATE)
    if file.spec.ssh.hosts_file not in (None, str(job.hosts_file)) and new.ssh is not None:
        _keep_hosts_file(job, file)
    for script in render.render(new, job, sys.executable):
        replace_text(job.scripts / script.name, script.text, mode=script.mode)


def _hosts_alone(overrides: Sequence[str], webhook: str | None) -> list[str]:
    """Return overrides as they are kept: of a webhook's address, which may bear a token, the host alone."""
    return [text.replace(webhook, host_alone(webhook)) if webhook else text for text in overrides]


def _overrides(job: JobDir) -> list[str]:
    """Return what `--set` and `--backend` changed up to now."""
    try:
        return list(codec.loads(tuple[str, ...], job.overrides.read_bytes()))
    except (OSError, codec.CodecError) as err:
        what, fix = (
            f"what the submit had set is missing or damaged: {err}",
            "write the list of --set texts anew, or []",
        )
        raise ClusterError(what, str(job.overrides), fix) from err
