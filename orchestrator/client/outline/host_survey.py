"""Survey of hosts over SSH without starting a job: their hardware, their environment, and their
free capacity for `orch nodes --free`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import fanout
from orchestrator.client.checks.seen_hosts import JOBS_MAX
from orchestrator.client.job import Job
from orchestrator.client.remote_files import remote_root
from orchestrator.core.codec import Json
from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir import home, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import PlannedNode
from orchestrator.core.wire.bootstrap import HeldLeases, HostSurveyed
from orchestrator.submission import bundle, render

if TYPE_CHECKING:
    from orchestrator.backends.ssh.connect.connection import Connection

ASK_S_MAX = 60.0
"""Limit on the answers of all hosts."""


def survey_hosts(plan: Plan, environ: Mapping[str, str]) -> dict[str, HostSurveyed | LaunchError]:
    """Return the facts about each host of a job over SSH, or why there are none. Leaves nothing on the hosts."""
    from orchestrator.backends.ssh import launch

    assert plan.ssh is not None and plan.pool is not None
    folder, root = home.job_home(environ), remote_root(plan)
    bundled = bundle.build(folder)
    job = JobDir(folder / "jobs" / plan.id)
    scripts = {file.name: file.text for file in render.render(plan, job, sys.executable)}
    gpus = plan.pool.gpus_each

    def ask(connection: Connection, host: str) -> HostSurveyed:
        launcher = launch.Launcher(scripts[f"{host}.sh"], bundled)
        survey = launch.survey(connection, launcher, root, programs=()).host
        if survey.fault:
            raise LaunchError("folder", survey.fault, survey.fix)
        if len(survey.gpus) < gpus:
            reason = f"it has {len(survey.gpus)} GPUs, and {gpus} are needed"
            raise LaunchError("gpus", reason, "lower gpus_per_node, or remove the host from the list")
        return survey

    return fanout.run_on_each([node.name for node in plan.nodes], plan.ssh, ask, limit_s=ASK_S_MAX)


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """Capacity of a host, and the jobs that use it; or why it is unknown."""

    gpus: int = 0
    slots: int = 0
    held: tuple[HeldLeases, ...] = ()
    fault: str = ""

    def as_json(self, wall_s: float) -> Json:
        """Return it as `orch nodes --free --json` prints it; `wall_s`: when the host answered, by this machine's clock."""
        held = [
            {
                "count": one.count,
                "things": one.names,
                "holder": one.holder,
                "since": status_file.iso(wall_s - one.for_s) if one.for_s is not None else None,
            }
            for one in self.held
        ]
        return {"gpus": self.gpus, "slots": self.slots, "held": held, "fault": self.fault}


def ask_capacities(folder: Path, environ: Mapping[str, str]) -> dict[str, HostCapacity]:
    """Ask the hosts of the latest jobs over SSH, each as the last job that named it reaches it. Raises ClusterError."""
    last_plans: dict[str, tuple[Plan, PlannedNode]] = {}
    for job in home.list_jobs(folder)[-JOBS_MAX:]:
        with contextlib.suppress(OSError, OrchError):
            plan = Job(job).plan()
            if plan.ssh is not None and home.is_own_job(job):
                last_plans |= {node.name: (plan, node) for node in plan.nodes}
    capacities: dict[str, HostCapacity] = {}
    for plan in {plan.id: plan for plan, _ in last_plans.values()}.values():
        nodes = tuple(node for last, node in last_plans.values() if last is plan)
        pool = plan.pool and replace(plan.pool, gpus_each=0)  # what is free does not depend on the last job
        answers = survey_hosts(replace(plan, nodes=nodes, pool=pool), environ)
        capacities |= {node.name: _capacity(node, answers[node.name]) for node in nodes}
    return capacities


def _capacity(node: PlannedNode, survey: HostSurveyed | LaunchError) -> HostCapacity:
    if isinstance(survey, LaunchError):
        return HostCapacity(fault=str(survey))
    return HostCapacity(len(survey.gpus), node.slots or survey.cores, survey.held)
