"""Entry of the bundle `orch.pyz`, and of `python -m orchestrator`: agent, supervisor and its watchdog.

Standard library only; the command line for people is `orchestrator.cli`.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.backends.api import Backend
    from orchestrator.core.jobdir.layout import JobDir
    from orchestrator.core.jobdir.plan import Plan


GC_THRESHOLD = (50_000, 10, 10)
"""Garbage collection of a supervisor: heartbeats of a large job make many objects and hardly any cycle."""


def main(argv: list[str]) -> int:
    """Run the role of the first word: `agent`, `supervise FOLDER`, `guard FOLDER`, or `--selftest`."""
    from orchestrator.core.jobdir import ownership

    ownership.restrict_umask()
    match argv:
        case ["agent"]:
            gc.disable()  # imports make lasting objects and no garbage
            from orchestrator.agent.process import agent, agent_monitor

            gc.freeze()
            gc.enable()
            return agent_monitor.main(agent.run_agent)
        case ["supervise", folder]:
            return _supervise(Path(folder))
        case ["guard", folder]:
            from orchestrator.supervisor import supervisor_watchdog

            return supervisor_watchdog.main(Path(folder))
        case ["--selftest"]:
            return _selftest()
        case _:
            print(
                "usage: orch VERB …, or python -m orchestrator.cli VERB …\n"
                "what orch itself starts: agent | supervise FOLDER | guard FOLDER | --selftest",
                file=sys.stderr,
            )
            return 2


def _supervise(folder: Path) -> int:
    """Run the supervisor of a job; a fault of its folder or disk is the last line of the supervisor's log."""
    from orchestrator.core.errors import OrchError
    from orchestrator.core.jobdir import full_disk
    from orchestrator.core.slurm import step_env
    from orchestrator.supervisor.main_loop import supervise
    from orchestrator.supervisor.supervisor_watchdog import EXIT_UNFIT_FOLDER

    gc.set_threshold(*GC_THRESHOLD)
    full_disk.buffer_output()
    try:
        return supervise(folder, _make_backend, step_env.allocation_id(os.environ))
    except OrchError as err:
        print(f"{err.where}: {err.what}; fix: {err.fix}", file=sys.stderr)
    except OSError as err:
        if err.errno != errno.ENOLCK:
            raise
        print(f"{err.filename}: {err.strerror}", file=sys.stderr)
    return EXIT_UNFIT_FOLDER


def _make_backend(job: JobDir, plan: Plan) -> Backend:
    """Return the backend of a plan; that of SSH jobs needs paramiko, on this machine alone."""
    if plan.backend == "ssh":
        from orchestrator.backends.ssh.backend import SshBackend

        return SshBackend(job, plan)
    if plan.slurm is not None:
        from orchestrator.backends.slurm.backend import create_backend

        return create_backend(job, os.environ, plan.slurm.options)
    from orchestrator.backends.local import LocalBackend

    return LocalBackend(job)


def _selftest() -> int:
    """Import all of the bundle, so that a node reports at once what its Python lacks."""
    from orchestrator.agent.bootstrap import entry
    from orchestrator.agent.process import agent, agent_monitor
    from orchestrator.backends import local
    from orchestrator.core.version import VERSION
    from orchestrator.supervisor import main_loop

    parts = (main_loop, local, agent, agent_monitor, entry)
    print(f"orch {VERSION} on Python {sys.version.split()[0]}: {len(parts)} parts load")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
