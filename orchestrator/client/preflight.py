"""Preflight check of a job (`orch check`): conditions that can be checked before a start, each fault with its fix. Starts no job."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.agent.host import program, rendezvous, resources, setup_script
from orchestrator.brain.checks import node
from orchestrator.brain.checks.finding import Finding, describe, error, note, passed, warning
from orchestrator.client import remote_files
from orchestrator.client.checks import checkpoint_space, sources
from orchestrator.core.errors import EXIT_INTERRUPTED, ClusterError, HostError, OrchError, UserError
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import PlannedNode
from orchestrator.core.text import format_count
from orchestrator.core.wire.bootstrap import AllReduce, GatherFacts
from orchestrator.spec.load import SpecFile, load
from orchestrator.submission import render, sbatch, snapshot, submit, submit_checks

FREE_BYTES_MIN = 1 << 30


def check(
    spec: Path,
    backend: str | None,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    say: Callable[[str], None] = lambda text: None,
    burn_s: float = 0.0,
) -> list[Finding]:
    """Return the findings in the order in which a job would meet them; the first fault of the plan is the last finding.

    `say` receives the position in Slurm's queue while it waits for nodes. Raises SpecError when the spec cannot be read.
    """
    file = load(spec, overrides=overrides, backend=backend)
    return list(_findings(file, environ, say, burn_s))


def _findings(
    file: SpecFile, environ: Mapping[str, str], say: Callable[[str], None], burn_s: float
) -> Iterator[Finding]:
    yield passed("spec", f"{file.path} can be read")
    try:
        plan = submit.make_plan(file, environ, home.new_id(file.spec.name, time.time()), time.time())
    except OrchError as err:
        yield _error_finding("plan", err)
        return
    try:
        submit_checks.refuse_too_many_ranks(file, plan)
        submit_checks.refuse_lack_of_memory(file, plan)
    except OrchError as err:
        yield _error_finding("plan", err)
        return
    yield passed("plan", plan.size_text)
    for host, why in plan.avoided_hosts.items():
        text = f"{host} is used only if no other host is left: it failed {why}"
        yield note("aside", (host,), text)
    code, code_bytes = _check_code(file, environ)
    local_findings = [code, _run_check("space", lambda: _check_space(home.job_home(environ)))]
    yield from local_findings
    if plan.ssh is not None:
        from orchestrator.client.checks import hosts

        yield from hosts.check_hosts(file, plan, remote_files.remote_root(plan), code_bytes, environ, burn_s, say)
        return
    local_findings += _check_python(file, plan, environ)
    yield from local_findings[2:]
    if plan.slurm is not None:
        yield from _check_slurm(file, plan, environ, local_findings, say, burn_s)
        return
    yield from _check_this_machine(plan, environ)
    interfaces = [name for _, name in socket.if_nameindex()]
    if fault := submit_checks.missing_interface(file.spec.rendezvous.interface, interfaces):
        where = file.where("rendezvous.interface")
        yield error("network", (), f"{where}: {fault}", "name one of these, or leave out the field", 2)
    yield _check_loopback()
    if burn_s:
        yield from _burn_in(file, plan, environ, burn_s, say)


def _error_finding(what: str, err: OrchError) -> Finding:
    return error(what, (), f"{err.where}: {err.what}" if err.where else err.what, err.fix, err.exit_code)


def _run_check(what: str, run: Callable[[], Finding]) -> Finding:
    try:
        return run()
    except OrchError as err:
        return _error_finding(what, err)


def _check_code(file: SpecFile, environ: Mapping[str, str]) -> tuple[Finding, int]:
    """Return how much code is copied, as a finding and in bytes."""
    limit_mb = file.spec.snapshot.limit_mb
    try:
        survey = snapshot.plan_snapshot(file.workdir, limit_mb, home.job_home(environ))
        size = f"{len(survey.copies)} files, {survey.size_bytes / 1e6:.1f} MB to copy"
        if file.spec.backend != "ssh":
            size += f", {len(survey.links)} git-ignored entries to link"
        elif not file.spec.ssh.sync:
            size += "; git-ignored files are not copied (ssh.sync is empty)"
        else:
            synced = snapshot.add_synced(survey, file.spec.ssh.sync, limit_mb, home.job_home(environ)).synced
            size += f", and {len(synced)} git-ignored files by ssh.sync"
    except OrchError as err:
        return _error_finding("code", err), 0
    return passed("code", size), survey.size_bytes


def _check_space(folder: Path) -> Finding:
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free at {place}"
    if not os.access(place, os.W_OK):
        return error("space", (), f"{place} cannot be written to", "set ORCH_HOME to another folder", 3)
    if free < FREE_BYTES_MIN:
        return error("space", (), found, "free some space, or set ORCH_HOME to another folder", 3)
    return passed("space", found)


def _check_python(file: SpecFile, plan: Plan, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Import torch, compile the script and find its imports as a rank would; a job need not use torch, so a missing
    torch is not a fault."""
    if plan.shell or "python" not in Path(plan.program).name:
        yield passed("python", f"not checked: the job runs {plan.program}")
        return
    # The GPUs of Slurm's nodes cannot be seen here.
    gpus = max((len(node.gpus) for node in plan.nodes), default=0)
    code, own_modules = sources.find_sources(file)
    env = {**environ, **plan.env}
    try:
        python = setup_script.find_program(plan.program, env, file.workdir)
    except HostError as err:
        yield error("python", (), f"{plan.program} cannot be used: {err}", _PYTHON_HINT, 3)
        return
    report = program.probe_program(GatherFacts(python, {}, code, own_modules, (), (), counts_gpus=bool(gpus)), env)
    if report.fault:
        yield error("python", (), f"{plan.program} cannot be used: {report.fault}", _PYTHON_HINT, 3)
        return
    torch = f"torch {report.torch}" if report.torch else f"no torch ({report.no_torch})"
    yield passed("python", f"{python} {report.python}, {torch}")
    if gpus and report.torch and report.gpus < gpus:
        found = f"torch {report.torch} sees {report.gpus} of {gpus} GPUs"
        yield error("gpus", (), found, "install a torch build for this driver's CUDA", 3)
    faults = list(node.check_code("", report, bool(plan.setup)))
    yield from (fault.finalize(fault.found, 2) for fault in faults)
    if code and not any(fault.what == "script" for fault in faults):
        count = f" and {format_count(len(code) - 1, 'module')} of the code" if len(code) > 1 else ""
        yield passed("script", f"{file.spec.entry.target}{count}: no syntax errors")


_PYTHON_HINT = "run it by hand to see why, or name another interpreter in python:"


def _check_this_machine(plan: Plan, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check this machine's resources and GPUs."""
    from orchestrator.agent.host import check_steps

    own, outside = str(home.job_home(environ)), resources.external_folders(plan.checkpoint_glob)
    folders = (own, *outside, *filter(None, [plan.memory_dir]))
    request = GatherFacts("", {}, (), (), folders, (), counts_gpus=False)
    facts = check_steps.CheckSteps(environ).gather_facts(request)
    ranks = sum(len(one.ranks) for one in plan.nodes)
    job = node.JobNeeds(
        ranks,
        sum(len(one.gpus) for one in plan.nodes),
        bool(plan.setup),
        checkpoint_space.last_bytes(plan, environ),
        plan.memory_bytes,
        plan.memory_dir,
    )
    hostname = socket.gethostname()
    for judged in node.findings(hostname, facts, job):
        yield judged.finalize(f"{hostname}: {judged.found}", ClusterError.exit_code)


def _burn_in(
    file: SpecFile, plan: Plan, environ: Mapping[str, str], burn_s: float, say: Callable[[str], None]
) -> Iterator[Finding]:
    """Burn this machine in, with the ranks' Python."""
    from orchestrator.agent.host import check_steps
    from orchestrator.client.checks import burn_in

    hostname, env = socket.gethostname(), {**environ, **plan.env}
    try:
        python = setup_script.find_program(plan.program, env, file.workdir)
    except HostError:
        yield note("burn-in", (), "no burn-in: the ranks' Python is missing, see above")
        return
    gpus = ",".join(str(gpu) for one in plan.nodes for gpu in one.gpus)
    env |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    steps = {hostname: AllReduce(0, 0, "", 0, python, {}, bool(gpus), folder=str(home.job_home(environ)))}
    host = check_steps.CheckSteps(env)
    for one in burn_in.burn_in(
        lambda asked, *_: {name: host.burn_in(step) for name, step in asked.items()},
        steps, burn_s, home.job_home(environ), say,
    ):  # fmt: skip
        yield one.finalize(describe(one), ClusterError.exit_code)


def _check_loopback() -> Finding:
    try:
        port = rendezvous.free_port(f"{os.getpid()} {time.monotonic_ns()}")
    except HostError as err:
        return error("network", (), str(err), "see which programs listen: ss -ltn", 3)
    return passed("network", f"127.0.0.1 has free ports, such as {port}")


# On Slurm


def _check_queue(file: SpecFile, plan: Plan, environ: Mapping[str, str]) -> Finding:
    """Run `sbatch --test-only`, which checks for every reason to refuse a submit, and estimates the start."""
    sbatch.require_commands(environ, file.where("backend"))
    script = render.render(plan, JobDir(home.job_home(environ) / "jobs" / plan.id), sys.executable)[0]
    return passed("queue", sbatch.test_only(script.text, environ, file.where))


def _check_slurm(
    file: SpecFile,
    plan: Plan,
    environ: Mapping[str, str],
    local_findings: Sequence[Finding],
    say: Callable[[str], None],
    burn_s: float,
) -> Iterator[Finding]:
    """Ask sbatch, and check the nodes of the allocation that this process is in, or of one that salloc waits for."""
    from orchestrator.client.checks import salloc, srun

    assert plan.slurm is not None
    queue = _run_check("queue", lambda: _check_queue(file, plan, environ))
    yield queue
    if srun.allocation_nodes(environ):
        yield from _check_nodes(file, plan, environ, burn_s, say)
        return
    if not all(finding.ok for finding in (*local_findings, queue)):
        yield note("nodes", (), "not checked: fix the faults above first")
        return
    with contextlib.ExitStack() as stack:
        try:
            allocation_env = stack.enter_context(salloc.allocation(file, plan.slurm.options, environ, say, burn_s))
        except KeyboardInterrupt:
            text = "not checked: interrupted while waiting in Slurm's queue"
            yield replace(note("nodes", (), text), exit_code=EXIT_INTERRUPTED)
        except UserError as err:
            yield _error_finding("nodes", err)
        except ClusterError as err:
            yield warning("nodes", (), f"not checked: {err.what}", err.fix)
        else:
            yield from _check_nodes(file, plan, allocation_env, burn_s, say)


def _check_nodes(
    file: SpecFile, plan: Plan, environ: Mapping[str, str], burn_s: float, say: Callable[[str], None]
) -> Iterator[Finding]:
    """Check the nodes of an allocation."""
    from orchestrator.client.checks import hosts, srun

    nodes = tuple(PlannedNode(name, name, "", (), ()) for name in srun.allocation_nodes(environ))
    root = str(home.job_home(environ) / "jobs" / plan.id)
    yield from hosts.check_hosts(file, replace(plan, nodes=nodes), root, 0, environ, burn_s, say)
