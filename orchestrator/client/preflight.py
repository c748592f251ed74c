"""Preflight of a job: every condition that can be checked before it starts, each fault with its fix. Starts no job."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.agent import setup_script
from orchestrator.agent.bootstrap.job_folder import SPARE_BYTES, megabytes
from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import fanout
from orchestrator.client import remote_files
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan, PlannedSsh
from orchestrator.core.text import counted
from orchestrator.spec.load import SpecFile, load
from orchestrator.submission import bundle, refusals, render, sbatch, snapshot, submit

if TYPE_CHECKING:
    from orchestrator.backends.ssh import launch
    from orchestrator.backends.ssh.connect.connection import Connection

IMPORT_S_MAX = 120.0
WORDS_CHARS_MAX = 300
FREE_BYTES_MIN = 1 << 30
_PROBE = """
import json, sys
script, counts_gpus = sys.argv[1:]
said = {"python": ".".join(map(str, sys.version_info[:3]))}
try:
    if script:
        with open(script, "rb") as file:
            compile(file.read(), script, "exec", dont_inherit=True)
except (SyntaxError, ValueError) as err:
    said["script"] = f"{script}:{getattr(err, 'lineno', 0) or 1}: {type(err).__name__}: {getattr(err, 'msg', err)}"
except OSError as err:
    said["script"] = f"{script}: {err.strerror}"
try:
    import torch
    said["torch"] = torch.__version__
    said["gpus"] = torch.cuda.device_count() if counts_gpus else 0
except BaseException as err:
    said["no_torch"] = f"{type(err).__name__}: {err}"
print()
print(json.dumps(said))
"""
"""Probe of the ranks' interpreter: compiles the script without running it; the last line printed is the report."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: whether it passed, what it found, and how to mend a fault."""

    what: str
    ok: bool
    found: str
    fix: str = ""
    exit_code: int = 0

    def as_json(self) -> Json:
        return {"what": self.what, "ok": self.ok, "found": self.found, "fix": self.fix}


def check(
    spec: Path, backend: str | None, overrides: Sequence[str], environ: Mapping[str, str]
) -> list[Finding]:
    """Return the findings in the order in which a job would meet them; the first fault of the plan is the last finding.

    Raises SpecError when the spec cannot be read.
    """
    file = load(spec, overrides=overrides, backend=backend)
    return list(_findings(file, environ))


def _findings(file: SpecFile, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding("spec", True, f"{file.path} can be read")
    try:
        plan = submit.plan_for(file, environ, home.new_id(file.spec.name, time.time()), time.time())
    except OrchError as err:
        yield _fault("plan", err)
        return
    yield Finding("plan", True, plan.size)
    code_bytes = 0
    try:
        found, code_bytes = _code(file, environ)
        yield Finding("code", True, found)
    except OrchError as err:
        yield _fault("code", err)
    yield _try("space", lambda: _space(home.home(environ)))
    if plan.ssh is not None:
        yield from _over_ssh(plan, code_bytes, environ, file.spec.rendezvous.interface)
        return
    yield from _python(file, plan, environ)
    interfaces = [name for _, name in socket.if_nameindex()]
    if plan.slurm is None and (
        fault := refusals.missing_interface(file.spec.rendezvous.interface, interfaces)
    ):
        where = file.where("rendezvous.interface")
        yield Finding("network", False, f"{where}: {fault}", "name one of these, or leave it out", 2)
    yield _try("queue", lambda: _queue(file, plan, environ)) if plan.slurm is not None else _loopback()


def _fault(what: str, err: OrchError) -> Finding:
    return Finding(what, False, f"{err.where}: {err.what}" if err.where else err.what, err.fix, err.exit_code)


def _try(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except OrchError as err:
        return _fault(what, err)


def _code(file: SpecFile, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return how much of the code is copied, in words and in bytes. Raises OrchError."""
    limit_mb = file.spec.snapshot.limit_mb
    survey = snapshot.survey(file.workdir, limit_mb, home.home(environ))
    size = f"{len(survey.copies)} files, {survey.size_bytes / 1e6:.1f} MB to copy"
    if file.spec.backend != "ssh":
        return f"{size}, {len(survey.links)} ignored entries to link", survey.size_bytes
    if not file.spec.ssh.sync:
        return f"{size}; ssh.sync names nothing of what git ignores", survey.size_bytes
    synced = snapshot.with_sync(survey, file.spec.ssh.sync, limit_mb, home.home(environ)).synced
    return f"{size}, and {len(synced)} more files by ssh.sync", survey.size_bytes


def _space(folder: Path) -> Finding:
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free at {place}"
    if not os.access(place, os.W_OK):
        return Finding("space", False, f"{place} cannot be written to", "set ORCH_HOME to another place", 3)
    if free < FREE_BYTES_MIN:
        return Finding("space", False, found, "free some space, or set ORCH_HOME to another place", 3)
    return Finding("space", True, found)


def _python(file: SpecFile, plan: Plan, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Import torch and compile the script as a rank would; a job need not use torch, so a missing torch is not a
    fault."""
    if plan.shell or "python" not in Path(plan.program).name:
        yield Finding("python", True, f"{plan.program} (not looked into)")
        return
    entry = file.spec.entry
    script = str(file.workdir / entry.target) if entry.kind == "script" else ""
    # The GPUs of Slurm's nodes cannot be seen here.
    gpus = max((len(node.gpus) for node in plan.nodes), default=0)
    try:
        python = setup_script.find_program(plan.program, {**environ, **plan.env}, file.workdir)
        report = _probe(python, script, "gpus" if gpus else "", {**environ, **plan.env})
    except (setup_script.SetupError, OSError, subprocess.TimeoutExpired, ValueError) as err:
        fix = "try it by hand, or name another interpreter in python:"
        yield Finding("python", False, f"{plan.program} cannot be used: {err}", fix, 3)
        return
    torch = f"torch {report['torch']}" if "torch" in report else f"no torch ({report.get('no_torch')})"
    yield Finding("python", True, f"{python} {report['python']}, {torch}")
    if gpus and "torch" in report and report["gpus"] < gpus:
        found = f"torch {report['torch']} sees {report['gpus']} of {gpus} GPUs"
        yield Finding("gpus", False, found, "install a torch that is built for this driver's CUDA", 3)
    if "script" in report:
        yield Finding("script", False, report["script"], "mend the script", 2)
    elif script:
        yield Finding("script", True, f"{entry.target} can be compiled")


def _probe(python: str, script: str, counts_gpus: str, env: Mapping[str, str]) -> Json:
    """Return the report of `_PROBE`. Raises ValueError with the last line of standard error when there is none."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, "-c", _PROBE, script, counts_gpus], cwd=folder, capture_output=True, text=True,
            timeout=IMPORT_S_MAX, env=env, errors="replace", check=False,
        )  # fmt: skip
    try:
        report = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(report, dict)
    except (IndexError, ValueError, AssertionError):
        words = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
        raise ValueError(words[0][:WORDS_CHARS_MAX]) from None
    return report


def _loopback() -> Finding:
    try:
        port = setup_script.free_port(f"{os.getpid()} {time.monotonic_ns()}")
    except setup_script.SetupError as err:
        return Finding("network", False, err.reason, "see what listens: ss -ltn", 3)
    return Finding("network", True, f"127.0.0.1 has free ports, {port} among them")


# On Slurm


def _queue(file: SpecFile, plan: Plan, environ: Mapping[str, str]) -> Finding:
    """Run `sbatch --test-only`, which checks all that a submit would be refused for, and estimates a start."""
    sbatch.require_commands(environ, file.where("backend"))
    script = render.render(plan, JobDir(home.home(environ) / "jobs" / plan.id), sys.executable)[0]
    return Finding("queue", True, sbatch.test(script.text, environ, file.where))


# Over SSH


def _over_ssh(
    plan: Plan, code_bytes: int, environ: Mapping[str, str], interface: str | None
) -> Iterator[Finding]:
    """Survey every host, all at once. An unusable host fails the whole check only when too few are left."""
    from orchestrator.backends.ssh import launch

    assert plan.ssh is not None and plan.pool is not None
    names, root = [node.name for node in plan.nodes], remote_files.remote_root(plan)
    yield _try("keys", lambda: _keys(names, plan.ssh))
    folder = home.home(environ)
    job, bundled = JobDir(folder / "jobs" / plan.id), bundle.build(folder)
    scripts = {file.name: file.text for file in render.render(plan, job, sys.executable)}

    def survey(connection: Connection, host: str) -> launch.Survey:
        report = launch.survey(
            connection, launch.Launcher(scripts[f"{host}.sh"], bundled), root, plan.programs
        )
        connection.forward(lambda channel: channel.close())
        return report

    surveys = fanout.each(names, plan.ssh, survey)
    wanted_bytes = 2 * code_bytes + len(bundled) + SPARE_BYTES  # the code as an archive, and unpacked
    fit = 0
    for node in plan.nodes:
        found = list(_of_host(node.name, surveys[node.name], plan, node.slots, wanted_bytes, interface))
        fit += all(finding.ok for finding in found)
        yield from found
    wanted = plan.pool.nodes + plan.pool.spares
    text = f"{fit} of {counted(len(names), 'host')} can be used, {wanted} wanted"
    if fit < wanted:
        fix = "mend the hosts named above, or add others"
        yield Finding("hosts", False, text, fix, ClusterError.exit_code)
    else:
        yield Finding("hosts", True, text)


def _keys(names: Sequence[str], ssh: PlannedSsh | None) -> Finding:
    assert ssh is not None
    fanout.refuse_locked_keys(names, ssh)
    return Finding("keys", True, "no passphrase has to be typed")


def _of_host(
    host: str,
    survey: launch.Survey | LaunchError,
    plan: Plan,
    slots: int,
    wanted_bytes: int,
    interface: str | None,
) -> Iterator[Finding]:
    """Yield what is wrong with a host, or in one line what it has."""
    if isinstance(survey, LaunchError):
        fix = survey.fix or "look at the host, and check again"
        yield Finding(survey.stage, False, f"{host}: {survey.reason}", fix)
        return
    assert plan.pool is not None
    seen, pool = survey.host, plan.pool
    faults = [(seen.fault, seen.fix)] if seen.fault else []
    if not seen.fault and seen.free_bytes < wanted_bytes:
        free = f"{megabytes(seen.free_bytes)} MB free in {seen.root}, {megabytes(wanted_bytes)} MB needed"
        faults.append((free, "free some space there, or set ssh.remote_dir to a larger disk"))
    if seen.noexec and _runs_a_program_of_the_code(plan):
        text = f"the disk of {seen.root} is mounted noexec, and {plan.program} is a program of the code"
        faults.append((text, "set ssh.remote_dir to another disk, or start it by an interpreter"))
    if missing := refusals.missing_interface(interface, seen.interfaces):
        faults.append((missing, "name another in rendezvous.interface, or leave it out"))
    if len(seen.gpus) < pool.gpus_each:
        text = f"it has {len(seen.gpus)} GPUs, and {pool.gpus_each} are wanted"
        faults.append((text, "lower gpus_per_node, or take the host off the list"))
    if plan.programs and not seen.program:
        faults.append(
            (f"it has none of {', '.join(plan.programs)}", "install it there, or name another in python:")
        )
    yield from (Finding("host", False, f"{host}: {text}", fix) for text, fix in faults)
    if not faults:
        cpus = f"{slots or seen.cores} slots" if not pool.gpus_each else f"{seen.cores} cores"
        parts = [
            f"Python {survey.version}", *([f"{len(seen.gpus)} GPUs"] if seen.gpus else []), cpus,
            f"{seen.free_bytes / 1e9:.1f} GB free" if seen.free_bytes >= FREE_BYTES_MIN
            else f"only {megabytes(seen.free_bytes)} MB free",
            *([f"{seen.program} has {_torch(seen.torch)}"] if plan.programs else []),
            *(() if seen.has_rsync else ("no rsync: copies go by SFTP",)), *survey.notes,
        ]  # fmt: skip
        yield Finding("host", True, f"{host}: {', '.join(parts)}")


def _runs_a_program_of_the_code(plan: Plan) -> bool:
    return "/" in plan.program and not plan.program.startswith(("/", "~"))


def _torch(version: str) -> str:
    return f"torch {version}" if version[:1].isdigit() else f"no torch that can be imported ({version})"
