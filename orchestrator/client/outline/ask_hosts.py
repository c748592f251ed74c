"""Questions to the hosts of a job that is not started: what hardware they have, and what their environment sets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import fanout
from orchestrator.client.remote_files import remote_root
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire.bootstrap import HostSurveyed
from orchestrator.submission import bundle, render

if TYPE_CHECKING:
    from orchestrator.backends.ssh.connect.connection import Connection

ASK_S_MAX = 60.0
"""How long all hosts together may take to answer."""


def ask_hosts(plan: Plan, environ: Mapping[str, str]) -> dict[str, HostSurveyed | LaunchError]:
    """Return the facts about each host of a job over SSH, or why it did not tell them. Leaves nothing there."""
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
            reason = f"it has {len(seen.gpus)} GPUs, and {gpus} are wanted"
            raise LaunchError("gpus", reason, "lower gpus_per_node, or take the host off the list")
        return seen

    return fanout.each([node.name for node in plan.nodes], plan.ssh, ask, limit_s=ASK_S_MAX)
