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
from orchestrator.core.planned import PlannedNode
from orchestrator.core.wire.bootstrap import HeldLeases, HostSurveyed
from orchestrator.submission import bundle, render

if TYPE_CHECKING:
    from orchestrator.backends.ssh.connect.connection import Connection

ASK_S_MAX = 60.0
"""Limit on the answers of all hosts."""


def ask_hosts(plan: Plan, environ: Mapping[str, str]) -> dict[str, HostSurveyed | LaunchError]:
    """Return the facts about each host of a job over SSH, or why there are none. Leaves nothing on the hosts."""
    from orchestrator.backends.ssh import launch

    assert plan.ssh is not None and plan.pool is not None
    folder, root = home.home(environ), remote_root(plan)
    bundled = bundle.build(folder)
    job = JobDir(folder / "jobs" / plan.id)
    scripts = {file.name: file.text for file in render.render(plan, job, sys.executable)}
    gpus = plan.pool.gpus_each

    def ask(connection: Connection, host: str) -> HostSurveyed:
        launcher = launch.Launcher(scripts[f"{host}.sh"], bundled)
        seen = launch.survey(connection, launcher, root, programs=()).host
        if seen.fault:
            raise LaunchError("folder", seen.fault, seen.fix)
        if len(seen.gpus) < gpus:
            reason = f"it has {len(seen.gpus)} GPUs, and {gpus} are needed"
            raise LaunchError("gpus", reason, "lower gpus_per_node, or remove the host from the list")
        return seen

    return fanout.each([node.name for node in plan.nodes], plan.ssh, ask, limit_s=ASK_S_MAX)


@dataclass(frozen=True, slots=True)
class Stock:
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
                "things": one.things,
                "holder": one.holder,
                "since": status_file.iso(wall_s - one.for_s) if one.for_s is not None else None,
            }
            for one in self.held
        ]
        return {"gpus": self.gpus, "slots": self.slots, "held": held, "fault": self.fault}


def ask_stocks(folder: Path, environ: Mapping[str, str]) -> dict[str, Stock]:
    """Ask the hosts of the latest jobs over SSH, each as the last job that named it reaches it. Raises ClusterError."""
    reached: dict[str, tuple[Plan, PlannedNode]] = {}
    for job in home.jobs(folder)[-JOBS_MAX:]:
        with contextlib.suppress(OSError, OrchError):
            plan = Job(job).plan()
            if plan.ssh is not None and home.is_ours(job):
                reached |= {node.name: (plan, node) for node in plan.nodes}
    stocks: dict[str, Stock] = {}
    for plan in {plan.id: plan for plan, _ in reached.values()}.values():
        nodes = tuple(node for last, node in reached.values() if last is plan)
        wanted = plan.pool and replace(plan.pool, gpus_each=0)  # what is free does not depend on the last job
        answers = ask_hosts(replace(plan, nodes=nodes, pool=wanted), environ)
        stocks |= {node.name: _stock(node, answers[node.name]) for node in nodes}
    return stocks


def _stock(node: PlannedNode, seen: HostSurveyed | LaunchError) -> Stock:
    if isinstance(seen, LaunchError):
        return Stock(fault=str(seen))
    return Stock(len(seen.gpus), node.slots or seen.cores, seen.held)
