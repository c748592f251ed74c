"""Preflight of a job: every condition that can be checked before it starts, each fault with its fix. Starts no job."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.agent import setup_script
from orchestrator.agent.bootstrap.job_folder import SPARE_BYTES, megabytes
from orchestrator.agent.checks import program
from orchestrator.agent.outputs.checkpoint_formats import inspect_shape
from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import fanout, launch
from orchestrator.brain.checks import node
from orchestrator.brain.checks.finding import Finding as BrainFinding
from orchestrator.brain.checks.finding import Severity
from orchestrator.client import remote_files
from orchestrator.client.checks import sources
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError
from orchestrator.core.host_facts import UNKNOWN, ProgramFacts
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan, PlannedNode, PlannedSsh
from orchestrator.core.text import counted
from orchestrator.core.wire.bootstrap import GatherFacts, HostSurveyed
from orchestrator.spec.load import SpecFile, load
from orchestrator.submission import bundle, refusals, render, sbatch, snapshot, submit
from orchestrator.submission.nodes import history

if TYPE_CHECKING:
    from orchestrator.client.checks import cluster

JOBS_READ_MAX = 5
"""How many earlier jobs of the same name are searched for a checkpoint."""

FREE_BYTES_MIN = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: whether it passed, what it found, and how to mend a fault.

    One that is ok and has a fix is a warning. `nodes`: those that it is about, empty for the whole job.
    """

    what: str
    ok: bool
    found: str
    fix: str = ""
    exit_code: int = 0
    nodes: tuple[str, ...] = ()
    is_note: bool = False

    @property
    def severity(self) -> str:
        """`error`, `warning`, `note`, or `ok`."""
        return "error" if not self.ok else "warning" if self.fix else "note" if self.is_note else "ok"

    def as_json(self) -> Json:
        return {
            "what": self.what, "ok": self.ok, "found": self.found, "fix": self.fix,
            "severity": self.severity, "nodes": list(self.nodes),
        }  # fmt: skip


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
    for host, why in plan.set_aside.items():
        text = f"{host} is taken only when no other host is left: it failed {why}"
        yield Finding("aside", True, text, nodes=(host,), is_note=True)
    code_bytes = 0
    try:
        found, code_bytes = _code(file, environ)
        yield Finding("code", True, found)
    except OrchError as err:
        yield _fault("code", err)
    yield _try("space", lambda: _space(home.home(environ)))
    if plan.ssh is not None:
        yield from _over_ssh(file, plan, code_bytes, environ)
        return
    yield from _python(file, plan, environ)
    if plan.slurm is None:
        yield from _here(plan, environ)
    interfaces = [name for _, name in socket.if_nameindex()]
    if plan.slurm is None and (
        fault := refusals.missing_interface(file.spec.rendezvous.interface, interfaces)
    ):
        where = file.where("rendezvous.interface")
        yield Finding("network", False, f"{where}: {fault}", "name one of these, or leave it out", 2)
    if plan.slurm is None:
        yield _loopback()
        return
    yield _try("queue", lambda: _queue(file, plan, environ))
    text = "not looked at: they are known when Slurm has chosen them"
    yield Finding("nodes", True, text, is_note=True)


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
    """Import torch, compile the script and look for its imports as a rank would; a job need not use torch, so a missing
    torch is not a fault."""
    if plan.shell or "python" not in Path(plan.program).name:
        yield Finding("python", True, f"{plan.program} (not looked into)")
        return
    # The GPUs of Slurm's nodes cannot be seen here.
    gpus = max((len(node.gpus) for node in plan.nodes), default=0)
    code, own = sources.of(file)
    env = {**environ, **plan.env}
    try:
        python = setup_script.find_program(plan.program, env, file.workdir)
    except setup_script.SetupError as err:
        yield Finding("python", False, f"{plan.program} cannot be used: {err}", _TRY_PYTHON, 3)
        return
    report = program.ask(python, env, code, own, counts_gpus=bool(gpus))
    if report.fault:
        yield Finding("python", False, f"{plan.program} cannot be used: {report.fault}", _TRY_PYTHON, 3)
        return
    torch = f"torch {report.torch}" if report.torch else f"no torch ({report.no_torch})"
    yield Finding("python", True, f"{python} {report.python}, {torch}")
    if gpus and report.torch and report.gpus < gpus:
        found = f"torch {report.torch} sees {report.gpus} of {gpus} GPUs"
        yield Finding("gpus", False, found, "install a torch that is built for this driver's CUDA", 3)
    faults = list(node.code("", report, bool(plan.setup)))
    yield from (_of_brain(fault, fault.found, 2) for fault in faults)
    if code and not any(fault.what == "script" for fault in faults):
        count = f" and {counted(len(code) - 1, 'module')} of the code" if len(code) > 1 else ""
        yield Finding("script", True, f"{file.spec.entry.target}{count} can be compiled")


_TRY_PYTHON = "try it by hand, or name another interpreter in python:"


def _of_brain(one: BrainFinding, found: str, exit_code: int) -> Finding:
    """Return a judged finding with its words; only an error has the exit code."""
    is_error = one.severity is Severity.ERROR
    return Finding(
        one.what, not is_error, found, one.fix, exit_code if is_error else 0,
        tuple(name for name in one.nodes if name), one.severity is Severity.NOTE,
    )  # fmt: skip


def _here(plan: Plan, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Look at this machine's resources and GPUs."""
    from orchestrator.agent.checks import steps

    asked = GatherFacts("", {}, (), (), (str(home.home(environ)), *_checkpoint_folder(plan)), (), False)
    facts = steps.Steps(environ).facts(asked)
    ranks = sum(len(one.ranks) for one in plan.nodes)
    job = node.Job(
        ranks,
        sum(len(one.gpus) for one in plan.nodes),
        bool(plan.setup),
        _last_checkpoint_bytes(plan, environ),
    )
    here = socket.gethostname()
    for judged in node.findings(here, facts, job):
        yield _of_brain(judged, f"{here}: {judged.found}", ClusterError.exit_code)


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


def _over_ssh(file: SpecFile, plan: Plan, code_bytes: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Survey every host, all at once, then check those that can be used together. Unusable hosts fail the whole check only
    when too few are left."""
    from orchestrator.client.checks import cluster, visits

    assert plan.ssh is not None and plan.pool is not None
    names, root = [node.name for node in plan.nodes], remote_files.remote_root(plan)
    yield _try("keys", lambda: _keys(names, plan.ssh))
    folder = home.home(environ)
    job, bundled = JobDir(folder / "jobs" / plan.id), bundle.build(folder)
    scripts = {one.name: one.text for one in render.render(plan, job, sys.executable)}
    launchers = {name: launch.Launcher(scripts[f"{name}.sh"], bundled) for name in names}
    wanted_bytes = 2 * code_bytes + len(bundled) + SPARE_BYTES  # the code as an archive, and unpacked
    with visits.Visits(plan.ssh, launchers, root, plan.programs) as hosts:
        surveys = hosts.surveys()
        seen = {name: one.host for name, one in surveys.items() if not isinstance(one, LaunchError)}
        faults = {
            one.name: list(
                _faults(one.name, surveys[one.name], plan, wanted_bytes, file.spec.rendezvous.interface)
            )
            for one in plan.nodes
        }
        fit = [name for name in names if not faults[name]]
        report = cluster.check(hosts, fit, _questions(file, plan, root, seen, environ))
    _remember(surveys, report, environ)
    for one in plan.nodes:
        yield from faults[one.name]
        survey = surveys[one.name]
        if one.name in report.facts and not isinstance(survey, LaunchError):
            yield _usable(one, survey, plan, report.facts[one.name].program)
    wanted = plan.pool.nodes + plan.pool.spares
    unusable = report.unusable()
    left = [name for name in fit if name not in unusable]
    for judged, words in cluster.lines_of(report):
        # An error of one node, or of a link, matters only where the job cannot do without it.
        spoils = len(left) - (len(judged.nodes) > 1) < wanted or not judged.nodes
        yield _of_brain(judged, words, ClusterError.exit_code if spoils else 0)
    yield from (Finding(what, True, words) for what, words in report.passed)
    text = f"{len(left)} of {counted(len(names), 'host')} can be used, {wanted} wanted"
    if len(left) < wanted:
        fix = "mend the hosts named above, or add others"
        yield Finding("hosts", False, text, fix, ClusterError.exit_code)
    else:
        yield Finding("hosts", True, text)


def _remember(
    surveys: Mapping[str, launch.Survey | LaunchError], report: cluster.Report, environ: Mapping[str, str]
) -> None:
    """Keep which hosts have failed and passed, for later jobs: by what is a host's own fault, not this job's."""
    lost = {name: str(one) for name, one in surveys.items() if isinstance(one, LaunchError)}
    passed = dict.fromkeys(report.facts, "")
    with contextlib.suppress(OSError):  # a check is worth as much without
        history.record_checks(home.home(environ), {**passed, **report.own_faults(), **lost}, time.time())


def _questions(
    file: SpecFile, plan: Plan, root: str, seen: Mapping[str, HostSurveyed], environ: Mapping[str, str]
) -> cluster.Questions:
    from orchestrator.client.checks import cluster

    assert plan.pool is not None
    code, own = sources.of(file)
    programs = {name: "" if _lies_in_the_code(one.program) else one.program for name, one in seen.items()}
    return cluster.Questions(
        job=node.Job(
            plan.pool.ranks_each, plan.pool.gpus_each, bool(plan.setup), _last_checkpoint_bytes(plan, environ)
        ),
        programs=programs,
        env=plan.env,
        sources=code,
        own=own,
        folders=(root, *_checkpoint_folder(plan)),
        addresses={one.name: one.address for one in plan.nodes},
        port=plan.rendezvous_port,
        interface=file.spec.rendezvous.interface,
    )


def _checkpoint_folder(plan: Plan) -> tuple[str, ...]:
    """Return the folder of checkpoints where the job names one outside its own, up to the first pattern."""
    path = Path(plan.checkpoint_glob)
    if not path.is_absolute():
        return ()
    parts = list(itertools.takewhile(lambda part: not set(part) & set("*?["), path.parts[:-1]))
    return (str(Path(*parts)),)


def _last_checkpoint_bytes(plan: Plan, environ: Mapping[str, str]) -> int:
    """Return the size of the newest checkpoint that an earlier job of this name has left here, UNKNOWN without one."""
    named = [job for job in home.jobs(home.home(environ)) if home.name_of(job.id) == plan.name]
    for job in reversed(named[-JOBS_READ_MAX:]):
        try:
            sizes = [
                inspect_shape(path) for path in job.checkpoints.iterdir() if not path.name.startswith(".")
            ]
        except OSError:
            continue
        if sizes:
            return max(sizes, key=lambda shape: shape.mtime_ns).size_bytes
    return UNKNOWN


def _keys(names: Sequence[str], ssh: PlannedSsh | None) -> Finding:
    assert ssh is not None
    fanout.refuse_locked_keys(names, ssh)
    return Finding("keys", True, "no passphrase has to be typed")


def _faults(
    host: str, survey: launch.Survey | LaunchError, plan: Plan, wanted_bytes: int, interface: str | None
) -> Iterator[Finding]:
    """Yield why a host cannot be used, before its ranks' Python is asked."""
    if isinstance(survey, LaunchError):
        fix = survey.fix or "look at the host, and check again"
        yield Finding(survey.stage, False, f"{host}: {survey.reason}", fix, nodes=(host,))
        return
    assert plan.pool is not None
    seen, pool = survey.host, plan.pool
    faults = [(seen.fault, seen.fix)] if seen.fault else []
    if not seen.fault and seen.free_bytes < wanted_bytes:
        free = f"{megabytes(seen.free_bytes)} MB free in {seen.root}, {megabytes(wanted_bytes)} MB needed"
        faults.append((free, "free some space there, or set ssh.remote_dir to a larger disk"))
    if seen.noexec and _lies_in_the_code(plan.program):
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
    yield from (Finding("host", False, f"{host}: {text}", fix, nodes=(host,)) for text, fix in faults)


def _usable(host: PlannedNode, survey: launch.Survey, plan: Plan, program: ProgramFacts | None) -> Finding:
    """Return what a host has, in one line."""
    assert plan.pool is not None
    seen = survey.host
    cpus = f"{host.slots or seen.cores} slots" if not plan.pool.gpus_each else f"{seen.cores} cores"
    parts = [
        f"Python {survey.version}", *([counted(len(seen.gpus), "GPU")] if seen.gpus else []), cpus,
        f"{seen.free_bytes / 1e9:.1f} GB free" if seen.free_bytes >= FREE_BYTES_MIN
        else f"only {megabytes(seen.free_bytes)} MB free",
        *([f"{seen.program} has {_torch(program)}"] if plan.programs else []),
        *(() if seen.has_rsync else ("no rsync: copies go by SFTP",)), *survey.notes,
    ]  # fmt: skip
    return Finding("host", True, f"{host.name}: {', '.join(parts)}", nodes=(host.name,))


def _lies_in_the_code(program: str) -> bool:
    return "/" in program and not program.startswith(("/", "~"))


def _torch(program: ProgramFacts | None) -> str:
    if program is None:
        return "what is not known: it lies in the code snapshot"
    return f"torch {program.torch}" if program.torch else f"no torch ({program.no_torch or program.fault})"
