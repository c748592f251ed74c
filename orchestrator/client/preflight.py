"""Could this job run? Every condition that can be looked at before it starts, each fault with its fix. Starts no job."""

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
from orchestrator.spec.load import SpecFile, load
from orchestrator.submission import bundle, refusals, render, sbatch, snapshot, submit

if TYPE_CHECKING:
    from orchestrator.backends.ssh import launch
    from orchestrator.backends.ssh.connect.connection import Connection

IMPORT_S_MAX = 120.0
WORDS_CHARS_MAX = 300
FREE_BYTES_MIN = 1 << 30
_LOOK = """
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
"""What the ranks' own interpreter is asked: the script is compiled and not run; the last line is the answer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: `ok`, what was found, and how to mend it when it is not ok."""

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
    """Return what was found, in the order a job would meet it; a job that cannot be planned is looked at no further.

    Raises SpecError when the spec cannot be read.
    """
    file = load(spec, overrides=overrides, backend=backend)
    return list(_findings(file, environ))


def _findings(file: SpecFile, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding("spec", True, f"{file.path} can be read")
    try:
        plan = submit.make_plan(file, environ, home.new_id(file.spec.name, time.time()), time.time())
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
    there = [name for _, name in socket.if_nameindex()]
    if plan.slurm is None and (fault := refusals.missing_interface(file.spec.rendezvous.interface, there)):
        where = file.where("rendezvous.interface")
        yield Finding("network", False, f"{where}: {fault}", "name one of these, or leave it out", 2)
    yield _try("queue", lambda: _queue(file, plan, environ)) if plan.slurm is not None else _loopback()


def _fault(what: str, err: OrchError) -> Finding:
    return Finding(what, False, f"{err.where}: {err.what}" if err.where else err.what, err.fix, err.exit_code)


def _try(what: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except OrchError as err:
        return _fault(what, err)


def _code(file: SpecFile, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return what of the code is copied, in words and in bytes. Raises OrchError."""
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
    """Import torch and compile the script as a rank would; a job need not use torch, so its lack is no fault."""
    if plan.shell or "python" not in Path(plan.program).name:
        yield Finding("python", True, f"{plan.program} (not looked into)")
        return
    entry = file.spec.entry
    script = str(file.workdir / entry.target) if entry.kind == "script" else ""
    gpus = max(
        (len(node.gpus) for node in plan.nodes), default=0
    )  # those of Slurm's nodes cannot be seen here
    try:
        python = setup_script.find_program(plan.program, {**environ, **plan.env}, file.workdir)
        said = _ask(python, script, "gpus" if gpus else "", {**environ, **plan.env})
    except (setup_script.SetupError, OSError, subprocess.TimeoutExpired, ValueError) as err:
        fix = "try it by hand, or name another interpreter in python:"
        yield Finding("python", False, f"{plan.program} cannot be used: {err}", fix, 3)
        return
    torch = f"torch {said['torch']}" if "torch" in said else f"no torch ({said.get('no_torch')})"
    yield Finding("python", True, f"{python} {said['python']}, {torch}")
    if gpus and "torch" in said and said["gpus"] < gpus:
        found = f"torch {said['torch']} sees {said['gpus']} of {gpus} GPUs"
        yield Finding("gpus", False, found, "install a torch that is built for this driver's CUDA", 3)
    if "script" in said:
        yield Finding("script", False, said["script"], "mend the script", 2)
    elif script:
        yield Finding("script", True, f"{entry.target} can be compiled")


def _ask(python: str, script: str, counts_gpus: str, env: Mapping[str, str]) -> Json:
    """Return what an interpreter says of itself. Raises ValueError with its last words when that is nothing."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, "-c", _LOOK, script, counts_gpus], cwd=folder, capture_output=True, text=True,
            timeout=IMPORT_S_MAX, env=env, errors="replace", check=False,
        )  # fmt: skip
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(said, dict)
    except (IndexError, ValueError, AssertionError):
        words = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
        raise ValueError(words[0][:WORDS_CHARS_MAX]) from None
    return said


def _loopback() -> Finding:
    try:
        port = setup_script.free_port(f"{os.getpid()} {time.monotonic_ns()}")
    except setup_script.SetupError as err:
        return Finding("network", False, err.reason, "see what listens: ss -ltn", 3)
    return Finding("network", True, f"127.0.0.1 has free ports, {port} among them")


# On Slurm


def _queue(file: SpecFile, plan: Plan, environ: Mapping[str, str]) -> Finding:
    """Ask sbatch, which looks at all that a submit would be refused for, and estimates a start."""
    sbatch.require_commands(environ, file.where("backend"))
    script = render.render(plan, JobDir(home.home(environ) / "jobs" / plan.id), sys.executable)[0]
    return Finding("queue", True, sbatch.test(script.text, environ, file.where))


# Over SSH


def _over_ssh(
    plan: Plan, code_bytes: int, environ: Mapping[str, str], interface: str | None
) -> Iterator[Finding]:
    """Look at every host, all at once. One that cannot be used is a fault of the whole only when too few are left."""
    from orchestrator.backends.ssh import launch

    assert plan.ssh is not None and plan.pool is not None
    names, root = [node.name for node in plan.nodes], remote_files.remote_root(plan)
    yield _try("keys", lambda: _keys(names, plan.ssh))
    folder = home.home(environ)
    job, bundled = JobDir(folder / "jobs" / plan.id), bundle.build(folder)
    scripts = {file.name: file.text for file in render.render(plan, job, sys.executable)}

    def look(there: Connection, host: str) -> launch.Survey:
        survey = launch.survey(there, launch.Launcher(scripts[f"{host}.sh"], bundled), root, plan.programs)
        there.forward(lambda channel: channel.close())
        return survey

    said = fanout.each(names, plan.ssh, look)
    wanted_bytes = 2 * code_bytes + len(bundled) + SPARE_BYTES  # the code as an archive, and unpacked
    fit = 0
    for node in plan.nodes:
        found = list(_of_host(node.name, said[node.name], plan, node.slots, wanted_bytes, interface))
        fit += all(one.ok for one in found)
        yield from found
    wanted = plan.pool.nodes + plan.pool.spares
    told = f"{fit} of {len(names)} host{'s' if len(names) != 1 else ''} can be used, {wanted} wanted"
    if fit < wanted:
        yield Finding(
            "hosts", False, told, "mend the hosts named above, or add others", ClusterError.exit_code
        )
    else:
        yield Finding("hosts", True, told)


def _keys(names: Sequence[str], ssh: PlannedSsh | None) -> Finding:
    assert ssh is not None
    fanout.refuse_locked_keys(names, ssh)
    return Finding("keys", True, "no passphrase has to be typed")


def _of_host(
    host: str,
    said: launch.Survey | LaunchError,
    plan: Plan,
    slots: int,
    wanted_bytes: int,
    interface: str | None,
) -> Iterator[Finding]:
    """Yield what is wrong with a host, or in one line what it has."""
    if isinstance(said, LaunchError):
        yield Finding(
            said.stage, False, f"{host}: {said.reason}", said.fix or "look at the host, and check again"
        )
        return
    assert plan.pool is not None
    looked, pool = said.looked, plan.pool
    faults = [(looked.fault, looked.fix)] if looked.fault else []
    if not looked.fault and looked.free_bytes < wanted_bytes:
        free = f"{megabytes(looked.free_bytes)} MB free in {looked.root}, {megabytes(wanted_bytes)} MB needed"
        faults.append((free, "free some space there, or set ssh.remote_dir to a larger disk"))
    if looked.noexec and _runs_a_program_of_the_code(plan):
        text = f"the disk of {looked.root} is mounted noexec, and {plan.program} is a program of the code"
        faults.append((text, "set ssh.remote_dir to another disk, or start it by an interpreter"))
    if missing := refusals.missing_interface(interface, looked.interfaces):
        faults.append((missing, "name another in rendezvous.interface, or leave it out"))
    if len(looked.gpus) < pool.gpus_each:
        text = f"it has {len(looked.gpus)} GPUs, and {pool.gpus_each} are wanted"
        faults.append((text, "lower gpus_per_node, or take the host off the list"))
    if plan.programs and not looked.program:
        faults.append(
            (f"it has none of {', '.join(plan.programs)}", "install it there, or name another in python:")
        )
    yield from (Finding("host", False, f"{host}: {text}", fix) for text, fix in faults)
    if not faults:
        cpus = f"{slots or looked.cores} slots" if not pool.gpus_each else f"{looked.cores} cores"
        parts = [
            f"Python {said.version}", *([f"{len(looked.gpus)} GPUs"] if looked.gpus else []), cpus,
            f"{looked.free_bytes / 1e9:.1f} GB free" if looked.free_bytes >= FREE_BYTES_MIN
            else f"only {megabytes(looked.free_bytes)} MB free",
            *([f"{looked.program} has {_torch(looked.torch)}"] if plan.programs else []),
            *(() if looked.has_rsync else ("no rsync: copies go by SFTP",)), *said.notes,
        ]  # fmt: skip
        yield Finding("host", True, f"{host}: {', '.join(parts)}")


def _runs_a_program_of_the_code(plan: Plan) -> bool:
    return "/" in plan.program and not plan.program.startswith(("/", "~"))


def _torch(said: str) -> str:
    return f"torch {said}" if said[:1].isdigit() else f"no torch that can be looked at ({said})"
