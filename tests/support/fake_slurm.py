"""A Slurm that says what a test tells it to: its commands as small scripts in a folder, and a job folder beside.

Every call is written down. What the scripts say was said by Slurm 22.05, but where a test names another version.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.client import slurm_status
from orchestrator.client.job import Job
from orchestrator.core import codec
from orchestrator.core.jobdir import home, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan, PlannedSlurm
from orchestrator.core.plan_types import PlannedPool, QueueTerms
from orchestrator.core.slurm.queue import SlurmQueue
from orchestrator.views import cells
from orchestrator.views import status as status_view
from tests.support import jobs

COMMANDS = ("squeue", "sacct", "scontrol", "scancel")
UNKNOWN_ID = "slurm_load_jobs error: Invalid job id specified\n"
NO_ACCOUNTS = "Slurm accounting storage is disabled\n"
CONFIG = "AccountingStorageType   = accounting_storage/none\nClusterName             = {}\nMinJobAge   = 300 sec\n"

PENDING = "7|PENDING|2026-11-21T06:26:01|2||Resources"
HELD = "7|PENDING|N/A|2||JobHeldUser"
RUNNING = "7|RUNNING|2026-11-21T06:21:01|2|node[1-2]|None"
COMPLETING = "7|COMPLETING|2026-11-21T06:21:01|2|node[1-2]|None"
FAILED = "7|FAILED|2026-11-21T06:21:01|2|node[1-2]|NonZeroExitCode"
CANCELLED = "7|CANCELLED|2026-11-21T06:21:01|2||BeginTime"
"""What squeue lists of a job 7, without its folder."""

SHOWN = "JobId=7 JobState=FAILED Reason=NonZeroExitCode Restarts=2 ExitCode=1:0 NodeList=node[1-2]\n"
"""What scontrol shows of it."""

_SCRIPT = """#!/bin/sh
cd {folder}
echo "{name} $*" >> calls
env > {name}.env
file={name}.out
[ -e "{name}.$2" ] && file="{name}.$2"
cat "$file.err" >&2
cat "$file"
exit "$(cat "$file.code")"
"""

SUPERVISOR = """import pathlib, sys
job = pathlib.Path(sys.argv[2])
with (job / "started").open("a") as file:
    file.write("x")
(job / "ended").touch()
(job / "endpoint").write_text("127.0.0.1:1")
"""
"""A supervisor that has ended its job when it can be heard: `endpoint` is what its starter waits for."""


class FakeSlurm:
    """The folder of commands, to be put into PATH."""

    def __init__(self, folder: Path, *, accounts: bool = False, cluster: str = "box") -> None:
        self.folder = folder
        folder.mkdir()
        for name in COMMANDS:
            script = folder / name
            script.write_text(_SCRIPT.format(folder=folder, name=name))
            script.chmod(0o755)
            self.says(f"{name}.out", "")
        self.says("squeue.out", "", UNKNOWN_ID, 1)
        self.says("sacct.out", "", "" if accounts else NO_ACCOUNTS, 0 if accounts else 1)
        self.says("scontrol.job", "", UNKNOWN_ID, 1)
        self.says("scontrol.config", CONFIG.format(cluster))

    @property
    def path(self) -> str:
        """PATH with these commands first."""
        return f"{self.folder}:/usr/bin:/bin"

    def says(self, what: str, out: str, err: str = "", code: int = 0) -> None:
        """Let a command say this from now on: `squeue.out`, or `scontrol.config` for `scontrol show config`."""
        (self.folder / what).write_text(out)
        (self.folder / f"{what}.err").write_text(err)
        (self.folder / f"{what}.code").write_text(str(code))

    def queue(self, *lines: str) -> None:
        """Let squeue list these lines."""
        self.says("squeue.out", "".join(f"{one}\n" for one in lines))

    def down(self) -> None:
        """Let nothing answer."""
        text = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
        for what in ("squeue.out", "scontrol.job", "scontrol.config", "scancel.out"):
            self.says(what, "", text, 1)

    def calls(self, name: str = "") -> list[str]:
        """Return the calls of a command, or of all, in order."""
        try:
            lines = (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [one for one in lines if one.startswith(name)]

    def environ(self, name: str) -> list[str]:
        """Return the environment of a command's last call."""
        return (self.folder / f"{name}.env").read_text().splitlines()


def installed(place: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Make a Slurm that is that of this machine, of which this process knows nothing yet; jobs are below `place`."""
    there = FakeSlurm(place / "slurm")
    monkeypatch.setenv("PATH", there.path)
    monkeypatch.setenv("ORCH_HOME", str(place))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(slurm_status, "QUEUE", SlurmQueue())
    return there


def plan(job_id: str) -> Plan:
    """Return the plan of a job for Slurm."""
    data = {**codec.pack(jobs.plan()), "id": job_id, "backend": "slurm", "nodes": []}
    data["pool"] = codec.pack(PlannedPool(2, 2, 0, 0, queue=QueueTerms(False, 60.0)))
    data["slurm"] = codec.pack(PlannedSlurm((), "TERM"))
    return codec.unpack(Plan, data)


def job(place: Path, *ids: str, name: str = "gpt", at_s: float = jobs.BEGAN_S) -> JobDir:
    """Make the folder of a job that Slurm was given under these ids, of which no supervisor has told anything."""
    folder = JobDir(place / "jobs" / home.new_id(name, at_s))
    for one in (folder.root, folder.code, folder.checkpoints, folder.logs, folder.requests, folder.scripts):
        one.mkdir(parents=True)
    folder.plan.write_text(codec.dumps(plan(folder.id)))
    folder.overrides.write_text("[]")
    folder.bundle.write_text(SUPERVISOR)
    if ids:
        folder.slurm.write_text(json.dumps(ids))
    return folder


def asked(folder: JobDir) -> list[dict[str, str]]:
    """Return what was asked of a job, in order."""
    return [json.loads(path.read_text()) for path in sorted(folder.requests.glob("*.json"))]


def tell(folder: JobDir, state: str, **more: Any) -> None:
    """Write a job's status as its supervisor does."""
    known = status_file.status_from_plan(plan(folder.id), state, "", time.time())
    status_file.write(folder, replace(known, **more), durable=False)


def shown(folder: JobDir) -> str:
    """Return a job's status as people see it."""
    return cells.plain_text(status_view.job(Job(folder).source.settled_status()))
