"""What if the supervisor dies? Ranks go on, the next look at the job revives it, and nothing is lost or told twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import orchestrator
from orchestrator.brain.brain import SLEEP_S_MIN
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import requests
from orchestrator.core.wire import reports
from orchestrator.journal import journal_file
from tests.support.local import FAKE_TORCH, STEPPER, WAIT_S_MAX, Desk, Sight, kill, wait_until

GATED = (
    STEPPER
    + """
gate = Path(os.environ["ORCH_CHECKPOINT_DIR"]) / "gate"


def wait_at_the_gate(step):
    while step == 50 and not gate.exists():
        optimizer.step()
        time.sleep(0.02)


run(60, at_step=wait_at_the_gate)
"""
)
"""Counts 49 steps, makes silent ones until the file `gate` is there, then the last."""

STEPS = list(range(1, 61))


def _gated(desk: Desk) -> Sight:
    return desk.submit({**FAKE_TORCH, "train.py": GATED}, nodes=2, entrypoint="train.py")


def _open_gate(job: Sight) -> None:
    (job.job.folder.checkpoints / "gate").touch()


def _state(pid: int) -> str:
    stat = procfs.stat(pid)
    return stat.state if stat is not None else ""


def _assert_nothing_lost_or_doubled(job: Sight) -> None:
    """The journal has every line once, every kept report once, and every rank's log has each step once."""
    entries = list(journal_file.read(job.job.folder.journal))
    assert [entry.n for entry in entries] == list(range(1, len(entries) + 1))
    kept = [(entry.incarnation, entry.seq) for entry in entries if entry.seq]
    assert len(kept) == len(set(kept))
    assert [entry.news.at for entry in entries if entry.seq] == sorted(entry.news.at for entry in entries if entry.seq)
    for rank in range(4):
        assert job.steps_logged(rank) == STEPS
    exits = sorted(one.rank for one in job.news(reports.Exited))
    assert exits == [0, 1, 2, 3]
    assert len(job.news(d.BeginAttempt)) == len(job.news(d.EndJob)) == 1


def test_dead_supervisor_restarts_by_itself(desk: Desk) -> None:
    """A supervisor that dies is started again automatically."""
    job = _gated(desk)
    job.wait_for_step(50)
    ranks = job.rank_procs()
    for starts, signum in ((2, signal.SIGKILL), (3, signal.SIGTERM)):
        kill(job.supervisor(), signum)
        began = lambda starts=starts: len(job.news(e.SupervisorStarted)) == starts  # noqa: E731
        wait_until(began, "another supervisor", 10.0)
    assert job.rank_procs() == ranks
    _open_gate(job)
    wait_until(job.job.folder.ended.exists, "the end, which no command has asked for")
    assert job.wait()["state"] == "SUCCEEDED"
    _assert_nothing_lost_or_doubled(job)


def test_ranks_run_without_supervisor_until_command_revives_it(desk: Desk) -> None:
    """Ranks keep running without a supervisor, and the next command starts it again."""
    job = _gated(desk)
    job.kill_supervisor()  # right after submit
    for step in (5, 20, 50):
        job.job.status()
        job.kill_supervisor()  # in the middle of its revival
        wait_until(lambda step=step: (job.job.status()["step"] or 0) >= step, f"step {step}")  # type: ignore[misc]
        ranks = job.rank_procs()
        job.kill_supervisor()
    step = job.job.status()["step"] or 0
    wait_until(lambda: (job.job.status()["step"] or 0) > step + 10, "steps that rise again")
    wait_until(lambda: all(node["state"] == "up" for node in job.seen()["nodes"]), "both nodes")
    assert job.rank_procs() == ranks
    assert job.seen()["restarts"] == 0
    _open_gate(job)
    assert job.wait()["state"] == "SUCCEEDED"
    _assert_nothing_lost_or_doubled(job)


@pytest.mark.soak
def test_events_without_supervisor_are_reported_later(desk: Desk) -> None:
    job = _gated(desk)
    job.wait_for_step(50)
    ranks = job.rank_procs()
    job.kill_supervisor()
    kill(ranks[3])
    wait_until(lambda: not procfs.is_alive(ranks[3]), "the end of rank 3")
    _open_gate(job)
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == ["crash", None]
    assert (job.verdict()["ranks"], job.verdict()["node"]) == ([3], "node-1")
    assert len([one for one in job.news(reports.Exited) if one.attempt == 1]) == 4


def test_unsupervised_success_is_recognised(desk: Desk) -> None:
    """A job that finished unsupervised is found to have succeeded."""
    job = _gated(desk)
    job.wait_for_step(50)
    ranks = job.rank_procs()
    job.kill_supervisor()
    _open_gate(job)
    wait_until(lambda: not any(procfs.is_alive(rank) for rank in ranks.values()), "the end of all ranks")
    assert job.wait()["state"] == "SUCCEEDED"
    _assert_nothing_lost_or_doubled(job)


def test_cancel_for_dead_supervisor_reaches_the_next(desk: Desk) -> None:
    """A cancel that was sent to a dead supervisor is carried out by the next one."""
    job = _gated(desk)
    job.wait_for_step(5)
    job.kill_supervisor()
    requests.send(job.job.folder.requests, "cancel")
    assert job.wait()["state"] == "CANCELLED"


@pytest.mark.soak
def test_torn_last_journal_line_is_dropped(desk: Desk) -> None:
    job = _gated(desk)
    job.wait_for_step(5)
    job.kill_supervisor()
    with job.job.folder.journal.open("a") as file:
        file.write('{"n":99999,"wall"')
    job.job.status()
    _open_gate(job)
    assert job.wait()["state"] == "SUCCEEDED"
    _assert_nothing_lost_or_doubled(job)


@pytest.mark.soak
def test_a_second_supervisor_leaves_the_first_alone(desk: Desk) -> None:
    job = _gated(desk)
    job.wait_for_step(1)
    first = job.supervisor()
    argv = [sys.executable, "-I", "-S", str(job.job.folder.bundle), "supervise", str(job.root)]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)
    who = f"(pid {first.pid} on {os.uname().nodename})"
    assert (second.returncode, second.stderr) == (0, f"another supervisor is running {who}\n")
    assert job.supervisor() == first
    assert len(job.news(e.SupervisorStarted)) == 1
    _open_gate(job)
    assert job.wait()["state"] == "SUCCEEDED"


def test_superseded_supervisor_wakes_and_exits_silently(
    desk: Desk,
) -> None:
    """A supervisor that wakes after another took over its job exits without sending anything."""
    job = _gated(desk)
    job.wait_for_step(50)
    ranks, old, lock = job.rank_procs(), job.supervisor(), job.job.folder.lock
    mine = lock.read_bytes()
    wait_until(lambda: _state(old.pid) == "S", "the supervisor between two rounds")
    os.kill(old.pid, signal.SIGSTOP)
    wait_until(lambda: _state(old.pid) == "T", "the stop")
    written = job.job.folder.journal.read_bytes()
    lock.write_text("1 another-machine\n")  # as one signs it that does not see the lock
    time.sleep(SLEEP_S_MIN + 1.0)  # a shorter pause is none: the lock is then looked at with the next chores
    os.kill(old.pid, signal.SIGCONT)
    wait_until(lambda: not procfs.is_alive(old), "the end of the supervisor")
    assert "has taken over the job (pid 1 on another-machine)" in job.job.folder.supervisor_log.read_text()
    assert job.job.folder.journal.read_bytes() == written
    assert job.rank_procs() == ranks
    lock.write_bytes(mine)
    _open_gate(job)
    assert job.wait()["state"] == "SUCCEEDED"
    _assert_nothing_lost_or_doubled(job)


def test_status_on_copied_job_folder_harms_nothing(desk: Desk) -> None:
    """Reading a copy of a running job does not harm the job."""
    job = _gated(desk)
    job.wait_for_step(49)
    ranks = job.rank_procs()
    copied = desk.folder / "copy"
    subprocess.run(["cp", "-a", f"{desk.environ['ORCH_HOME']}/.", copied], check=True)
    for verb, code in (("status", 0), ("cancel", 2), ("clean", 2)):
        line = [sys.executable, "-m", "orchestrator.cli", verb, job.job.id]
        seen = subprocess.run(
            line, env={**desk.environ, "ORCH_HOME": str(copied)}, capture_output=True, text=True, check=False
        )
        assert seen.returncode == code and f"a copy of {job.root}" in seen.stdout + seen.stderr
    (job.job.folder.checkpoints / "gate").touch()
    assert job.wait()["state"] == "SUCCEEDED" and job.seen()["attempt"] == 1
    assert job.steps_logged() == STEPS and len(ranks) == 4


NESTED = """
import os, subprocess, sys

subprocess.run([sys.executable, "-m", "orchestrator.cli", "submit", "inner.yaml"], check=True)
"""

INNER = """
import os, time

while not os.path.exists(os.environ["ORCH_CHECKPOINT_DIR"] + "/gate"):
    time.sleep(0.02)
"""


def test_job_submitted_by_rank_outlives_the_outer_job(desk: Desk) -> None:
    """A job that a rank submits keeps running when the outer one has ended."""
    inner = "name: inner\nnodes: 1\nprocs_per_node: 1\nentrypoint: inner.py\n"
    files = {"train.py": NESTED, "inner.py": INNER, "inner.yaml": inner}
    outer = desk.submit(files, procs_per_node=1, entrypoint="train.py")
    assert outer.wait()["state"] == "SUCCEEDED"
    job = Sight(orchestrator.find("inner", desk.environ), desk.environ)
    desk.jobs.append(job)
    supervisor = job.supervisor()
    wait_until(lambda: not outer.processes(), "the outer job's processes have left")
    (job.job.folder.checkpoints / "gate").touch()
    assert job.wait()["state"] == "SUCCEEDED"
    assert [started.pid for started in job.news(e.SupervisorStarted)] == [supervisor.pid]
