"""What do the tests of whole jobs share? A desk to submit from, things to wait for, and a look for what is left over.

Rules: each test has a home of its own; whatever it started is gone at its end, or the test fails; processes are killed
by pid and start time; nothing is waited for without a limit and a name.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

import orchestrator
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import News
from orchestrator.client.job import Job
from orchestrator.core.host import procfs
from orchestrator.core.host.procfs import Proc
from orchestrator.journal import journal_file
from orchestrator.supervisor import status

T = TypeVar("T")

WAIT_S_MAX = 90.0
"""How long anything may take on a machine that is busy with other things; on a quiet one it is 50 times faster."""

GONE_S_MAX = 20.0
"""How long the processes of an ended job may take to leave."""

POLL_S = 0.05

FAKE_TORCH = {
    "torch/__init__.py": "",
    "torch/optim/__init__.py": "",
    "torch/optim/optimizer.py": """
hooks = []


def register_optimizer_step_post_hook(hook):
    hooks.append(hook)


class Optimizer:
    def step(self):
        for hook in hooks:
            hook(self, (), {})
""",
}
"""What the hook needs of torch to count steps; the real one takes a second or two to import, in every rank."""


def start_for(files: Mapping[str, str]) -> str:
    """Return the `start` of a job with these files: a template would import the real torch beside `FAKE_TORCH`, in vain."""
    return "fresh" if FAKE_TORCH.keys() <= files.keys() else "auto"


STEPPER = """
import os, sys, time
from pathlib import Path
from torch.optim.optimizer import Optimizer
import colorsys  # any import after torch lets the hook see that it is there

rank, attempt = int(os.environ["RANK"]), int(os.environ["ORCH_ATTEMPT"])
optimizer = Optimizer()


def run(steps, each_s=0.01, at_step=lambda step: None, start=0):
    for step in range(start + 1, steps + 1):
        at_step(step)
        optimizer.step()
        os.write(1, f"attempt {attempt} step {step}\\n".encode())
        time.sleep(each_s)
"""
"""Makes steps without torch: `run(steps)`; `at_step` runs before each."""


def wait_until(condition: Callable[[], T], what: str, limit_s: float = WAIT_S_MAX) -> T:
    """Return the first true value of `condition`; fail, naming `what`, when it does not come within `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            pytest.fail(f"within {limit_s:g} s it never came: {what}")
        time.sleep(POLL_S)
    return value


def kill(proc: Proc, signum: int = signal.SIGKILL) -> None:
    """Send a signal to that very process, if it still is."""
    if procfs.is_alive(proc):
        os.kill(proc.pid, signum)


def proc_of(pid: int) -> Proc:
    """Return the process that has this pid now."""
    stat = procfs.stat(pid)
    assert stat is not None, f"there is no process {pid}"
    return Proc(pid, stat.start_ticks)


@dataclass(frozen=True, slots=True)
class Sight:
    """A submitted job, and what the tests look at in it."""

    job: Job
    environ: Mapping[str, str]

    @property
    def root(self) -> Path:
        return self.job.folder.root

    def seen(self) -> dict[str, Any]:
        """Return the status file as it stands, without reviving anybody."""
        try:
            known: dict[str, Any] = json.loads(self.job.folder.state.read_bytes())
        except FileNotFoundError:
            return {"state": "", "step": None, "attempt": 0, "ranks": [], "checkpoint": None}
        return known

    def wait(self, limit_s: float = WAIT_S_MAX) -> dict[str, Any]:
        return self.job.wait(limit_s)

    def wait_for_state(self, state: str) -> dict[str, Any]:
        return wait_until(lambda: self.seen()["state"] == state and self.seen(), f"state {state}, {self.seen()}")

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: (self.seen()["step"] or 0) >= step, f"step {step}")

    def wait_for_line(self, text: str, rank: int = 0, attempt: int = 1) -> None:
        wait_until(lambda: text in self.log(rank, attempt), f"{text!r} in the log of rank {rank}")

    def log(self, rank: int = 0, attempt: int = 1) -> str:
        path = self.job.folder.rank_log(attempt, rank)
        return path.read_text() if path.exists() else ""

    def steps_logged(self, rank: int = 0, attempt: int = 1) -> list[int]:
        """Return the steps that a rank of `STEPPER` has printed, in order."""
        lines = self.log(rank, attempt).splitlines()
        return [int(line.rpartition(" ")[2]) for line in lines if line.startswith("attempt ")]

    def news(self, *kinds: type[Any]) -> list[Any]:
        """Return what the journal holds of these kinds: events, decisions, or the reports and orders in them."""
        entries: list[News] = [entry.news for entry in journal_file.read(self.job.folder.journal)]
        if not kinds:
            return entries
        held = (one if isinstance(one, kinds) else journal_file.unwrap_message(one) for one in entries)
        return [one for one in held if isinstance(one, kinds)]

    def notices(self, *topics: d.NoticeTopic) -> list[d.Notice]:
        """Return what a person was told on some topics."""
        return [one for one in self.news(d.Notice) if one.topic in topics]

    def attempts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.job.why()["attempts"]
        return found

    def verdicts(self) -> list[dict[str, Any] | None]:
        return [attempt["verdict"] for attempt in self.attempts()]

    def verdict(self, attempt: int = 1) -> dict[str, Any]:
        found = self.verdicts()[attempt - 1]
        assert found is not None, f"attempt {attempt} has no verdict"
        return found

    def kinds(self) -> list[str | None]:
        return [one["kind"] if one else None for one in self.verdicts()]

    def supervisor(self) -> Proc:
        """Return the supervisor; one that was just started may not have put its pid into the lock file yet."""

        def pid() -> int:
            words = self.job.folder.lock.read_text().split()
            return int(words[0]) if words and procfs.stat(int(words[0])) else 0

        return proc_of(wait_until(pid, "a supervisor"))

    def kill_supervisor(self) -> None:
        """Kill the supervisor and before it its guard, which would start another, and wait until both are gone."""
        supervisor = self.supervisor()
        stat = procfs.stat(supervisor.pid)
        assert stat is not None
        guards = [proc_of(stat.ppid)] if b"guard" in _words(stat.ppid, "cmdline") else []
        for one in (*guards, supervisor):
            kill(one)
            wait_until(lambda one=one: not procfs.is_alive(one), "the supervisor's end")  # type: ignore[misc]

    def keeper(self, node: str = "node-0") -> Proc:
        record = json.loads((self.job.folder.node(node) / "agent.json").read_text())
        return Proc(record["pid"], record["start_ticks"])

    def agent(self, node: str = "node-0") -> Proc:
        found = procfs.children().get(self.keeper(node).pid, [])
        return proc_of(next(pid for pid in found if _comm(pid) == "orch-agent"))

    def rank_procs(self) -> dict[int, Proc]:
        """Return the ranks' processes once all are started."""

        def pids() -> dict[int, int]:
            ranks = self.seen()["ranks"]
            found = {one["rank"]: one["pid"] for one in ranks if one["pid"] and procfs.stat(one["pid"])}
            return found if found and len(found) == len(ranks) else {}

        return {rank: proc_of(pid) for rank, pid in wait_until(pids, "the pids of all ranks").items()}

    def commands(self) -> list[bytes]:
        """Return the command lines of this job's processes, words separated by blanks."""
        return [b" ".join(_words(proc.pid, "cmdline")) for proc in self.processes()]

    def processes(self) -> list[Proc]:
        """Return every process of this job: by the tag in its environment, or the bundle in its arguments."""
        tag, bundle = f"ORCH_TAG={self.job.id}/".encode(), str(self.job.folder.bundle).encode()
        found = []
        for pid in procfs.pids():
            marked = any(entry.startswith(tag) for entry in _words(pid, "environ"))
            stat = procfs.stat(pid)
            if (marked or bundle in _words(pid, "cmdline")) and stat is not None and stat.state not in "ZX":
                found.append(Proc(pid, stat.start_ticks))
        return found


def _words(pid: int, name: str) -> list[bytes]:
    try:
        return (procfs.PROC / str(pid) / name).read_bytes().split(b"\0")
    except OSError:
        return []


def _comm(pid: int) -> str:
    try:
        return (procfs.PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


@dataclass(slots=True)
class Desk:
    """Submits jobs from a folder of its own, and clears up after them."""

    folder: Path
    environ: dict[str, str]
    jobs: list[Sight] = field(default_factory=list)

    def submit(self, files: Mapping[str, str], *, overrides: tuple[str, ...] = (), **spec: object) -> Sight:
        """Write the files and a job file with the given fields, and submit it; sections are merged into the tests'."""
        work = self.folder / f"work-{len(self.jobs)}"
        for name, text in files.items():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        whole: dict[str, Any] = {
            "name": "t", "nodes": 1, "procs_per_node": 2,
            "monitor": {"heartbeat_s": 0.2, "stop_grace": 5}, "restart": {"backoff": 0}, "start": start_for(files),
        }  # fmt: skip
        for key, value in spec.items():
            whole[key] = {**whole[key], **value} if isinstance(value, dict) and key in whole else value
        path = work / "job.yaml"
        path.write_text(yaml.safe_dump(whole))
        job = orchestrator.submit(path, overrides=overrides, environ=self.environ)
        sight = Sight(job, self.environ)
        self.jobs.append(sight)
        return sight

    def clear_up(self) -> list[str]:
        """End what is not over, kill what is left, and return what ended jobs have left."""
        left: list[str] = []
        for sight in self.jobs:
            if sight.seen()["state"] not in status.ENDED:
                for proc in [*sight.processes(), *_shepherds(sight)]:
                    kill(proc)
            deadline_s = time.monotonic() + GONE_S_MAX
            while (found := sight.processes()) and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
            for proc in found:
                left.append(f"{sight.job.id}: pid {proc.pid} {b' '.join(_words(proc.pid, 'cmdline'))!r}")
                kill(proc)
        return left


@contextmanager
def desk_at(folder: Path, home: str = "home") -> Iterator[Desk]:
    """Give a desk with a home of its own in `folder`; afterwards nothing of its jobs may be left."""
    desk = Desk(folder, {**os.environ, "ORCH_HOME": str(folder / home)})
    try:
        yield desk
    finally:
        left = desk.clear_up()
    assert not left, "processes of ended jobs were left:\n" + "\n".join(left)


def _shepherds(sight: Sight) -> list[Proc]:
    """Return the keepers and agents of a job that is to be killed: first, or they would start others."""
    return [proc for proc in sight.processes() if _comm(proc.pid).startswith("orch-")]
