"""Check of hosts for `orch check`: each is surveyed, then the usable ones are checked together.

Over SSH they are the hosts of the job file, on Slurm the nodes of the allocation that the check runs in.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from orchestrator.agent.bootstrap.job_folder import SPARE_BYTES, format_megabytes
from orchestrator.agent.host import resources
from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import launch
from orchestrator.brain.checks import node
from orchestrator.brain.checks.finding import Finding, describe, error, passed, warning
from orchestrator.client.checks import burn_in, checkpoint_space, cluster, host_sessions, sources, srun
from orchestrator.core.errors import ClusterError
from orchestrator.core.host import host_health
from orchestrator.core.host_facts import ProgramFacts
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import PlannedNode, PlannedPool
from orchestrator.core.text import format_count
from orchestrator.core.wire.bootstrap import HostSurveyed
from orchestrator.spec.load import SpecFile
from orchestrator.submission import bundle, render, submit_checks

FREE_BYTES_MIN = 1 << 30
"""Below this the finding says that only so much is free."""


def check_hosts(
    file: SpecFile,
    plan: Plan,
    root: str,
    code_bytes: int,
    environ: Mapping[str, str],
    burn_s: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Finding]:
    """Survey every host, all at once, then check those that can be used together. Unusable hosts fail the check only
    when too few are left."""
    assert plan.pool is not None
    names = [node.name for node in plan.nodes]
    bundled = bundle.build(home.job_home(environ))
    scripts = {host_script.name: host_script.text for host_script in render.host_scripts(plan, root, sys.executable)}
    launchers = {name: launch.Launcher(scripts[f"{name}.sh"], bundled) for name in names}
    wanted_bytes = 2 * code_bytes + len(bundled) + SPARE_BYTES  # the code as an archive, and unpacked
    limit_s = host_sessions.SESSIONS_S_MAX + 2 * burn_s
    reach = (
        host_sessions.reach_by_ssh(plan.ssh, limit_s) if plan.ssh is not None else srun.reach_by_srun(environ, limit_s)
    )
    with host_sessions.HostSessions(reach, launchers, root, plan.pythons, limit_s) as hosts:
        surveys = hosts.surveys()
        surveyed, lost = host_sessions.split_answers(surveys)
        interface = file.spec.rendezvous.interface
        faults = {name: list(_host_faults(name, surveys[name], plan, wanted_bytes, interface)) for name in names}
        candidates = [name for name in names if not faults[name]]
        request = _make_request(file, plan, root, surveyed, environ)
        report = cluster.check(hosts, candidates, request)
        if burn_s:
            report.findings += burn_in.check(hosts.ask, request, report, burn_s, home.job_home(environ), say)
    for name in report.facts:
        report.findings += node.check_clock(name, surveyed[name].clock_s, surveyed[name].clock_error_s)
    _record_results(surveyed, lost, report, environ)
    for planned in plan.nodes:
        yield from faults[planned.name]
        if planned.name in report.facts:
            yield _usable_finding(planned, surveyed[planned.name], plan, report.facts[planned.name].program)
    wanted_hosts = plan.pool.nodes + plan.pool.spares
    unusable = report.unusable()
    usable = [name for name in candidates if name not in unusable]
    for judged in report.findings:
        # An error of one node or link is fatal only if the job needs that node.
        is_fatal = len(usable) - (len(judged.nodes) > 1) < wanted_hosts or not judged.nodes
        yield judged.finalize(describe(judged), ClusterError.exit_code if is_fatal else 0)
    yield from (passed(*row) for row in report.passed)
    text = f"{len(usable)} of {format_count(len(names), 'host')} can be used, {wanted_hosts} needed"
    if len(usable) < wanted_hosts:
        fix = "fix the hosts named above, or add others"
        yield error("hosts", (), text, fix, ClusterError.exit_code)
    else:
        yield passed("hosts", text)
    busy = [one.name for one in plan.nodes if one.name in usable and _is_busy(one, surveyed[one.name].host, plan.pool)]
    if len(usable) - len(busy) < wanted_hosts <= len(usable):
        text = (
            f"{len(usable) - len(busy)} of {format_count(len(usable), 'host')} have enough free now: a job would wait"
        )
        fix = f"wait, or see above who uses {', '.join(busy[:5])}; monitor.queue_timeout limits the wait"
        yield warning("free", (), text, fix)


def _is_busy(host: PlannedNode, survey: HostSurveyed, pool: PlannedPool) -> bool:
    """Return whether other jobs use so much of a host that an attempt must wait for it."""
    kind = "GPU" if pool.gpus_each else "slot"
    total = len(survey.gpus) if pool.gpus_each else host.slots or survey.cores
    wanted = pool.gpus_each or min(pool.ranks_each, total)
    return total - _count_held(survey, kind) < wanted


def _count_held(survey: HostSurveyed, kind: str) -> int:
    return sum(one.count for one in survey.held if one.names.startswith(kind))


def _record_results(
    surveyed: Mapping[str, launch.Survey],
    lost: Mapping[str, LaunchError],
    report: cluster.ClusterReport,
    environ: Mapping[str, str],
) -> None:
    """Record for later jobs which hosts passed and which failed by a fault of their own."""
    faults = {**dict.fromkeys(report.facts, ""), **report.host_faults(), **lost}
    with contextlib.suppress(OSError):  # the check is valid without it
        for host, fault in faults.items():
            gpus = len(surveyed[host].host.gpus) if host in surveyed else None
            host_health.write(home.job_home(environ), host_health.HostHealth(host, time.time(), str(fault), gpus=gpus))


def _make_request(
    file: SpecFile, plan: Plan, root: str, surveyed: Mapping[str, launch.Survey], environ: Mapping[str, str]
) -> cluster.CheckRequest:
    assert plan.pool is not None
    code, own_modules = sources.find_sources(file)
    surveys = {name: one.host for name, one in surveyed.items()}
    programs = {name: "" if _is_in_code(one.program) else one.program for name, one in surveys.items()}
    return cluster.CheckRequest(
        job=node.JobNeeds(
            plan.pool.ranks_each,
            plan.pool.gpus_each,
            bool(plan.setup),
            checkpoint_space.last_bytes(plan, environ),
            plan.memory_bytes,
            plan.memory_dir,
        ),
        programs=programs,
        env=plan.env,
        sources=code,
        own_modules=own_modules,
        folders=(root, *resources.external_folders(plan.checkpoint_glob), *filter(None, [plan.memory_dir])),
        addresses={one.name: one.address for one in plan.nodes},
        port=plan.rendezvous_port,
        interface=file.spec.rendezvous.interface,
        gpus_held=tuple(name for name, one in surveys.items() if plan.ssh is not None and _count_held(one, "GPU")),
    )


def _host_faults(
    host: str, survey: launch.Survey | LaunchError, plan: Plan, wanted_bytes: int, interface: str | None
) -> Iterator[Finding]:
    """Yield the reasons why a host cannot be used, before its Python is checked."""
    if isinstance(survey, LaunchError):
        yield error(
            survey.stage, (host,), f"{host}: {survey.reason}", survey.fix or "inspect the host, then check again"
        )
        return
    assert plan.pool is not None
    seen, pool = survey.host, plan.pool
    faults = [(seen.fault, seen.fix)] if seen.fault else []
    if not seen.fault and seen.free_bytes < wanted_bytes:
        free = f"{format_megabytes(seen.free_bytes)} MB free in {seen.root}, {format_megabytes(wanted_bytes)} MB needed"
        faults.append((free, "free some space there, or set ssh.remote_dir to a larger disk"))
    if seen.noexec and _is_in_code(plan.program):
        text = f"the disk of {seen.root} is mounted noexec, and {plan.program} is in the job's code"
        faults.append((text, "set ssh.remote_dir to another disk, or run it through an interpreter"))
    if missing := submit_checks.missing_interface(interface, seen.interfaces):
        faults.append((missing, "name another one in rendezvous.interface, or leave out the field"))
    if len(seen.gpus) < pool.gpus_each:
        text = f"it has {len(seen.gpus)} GPUs, and {pool.gpus_each} are needed"
        faults.append((text, "lower gpus_per_node, or remove the host from the list"))
    if plan.pythons and not seen.program:
        faults.append((f"it has none of {', '.join(plan.pythons)}", "install it there, or name another one in python:"))
    yield from (error("host", (host,), f"{host}: {text}", fix) for text, fix in faults)


def _usable_finding(host: PlannedNode, survey: launch.Survey, plan: Plan, program: ProgramFacts | None) -> Finding:
    assert plan.pool is not None
    seen = survey.host
    cpus = f"{host.slots or seen.cores} slots" if not plan.pool.gpus_each else f"{seen.cores} cores"
    parts = [
        f"Python {survey.version}", *([format_count(len(seen.gpus), "GPU")] if seen.gpus else []), cpus,
        f"{seen.free_bytes / 1e9:.1f} GB free" if seen.free_bytes >= FREE_BYTES_MIN
        else f"only {format_megabytes(seen.free_bytes)} MB free",
        *([f"{seen.program} has {_torch_text(program)}"] if plan.pythons else []),
        *map(str, seen.held), *(() if seen.has_rsync else ("no rsync: files are copied by SFTP",)), *survey.notes,
    ]  # fmt: skip
    return passed("host", f"{host.name}: {', '.join(parts)}", (host.name,))


def _is_in_code(program: str) -> bool:
    return "/" in program and not program.startswith(("/", "~"))


def _torch_text(program: ProgramFacts | None) -> str:
    if program is None:
        return "an unknown torch: it is in the code snapshot"
    return f"torch {program.torch}" if program.torch else f"no torch ({program.no_torch or program.fault})"
