"""Ranks as real processes: their environment, how they are stopped, and that none outlives its agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.agent.ranks import processes as ranks_module
from orchestrator.agent.ranks import spawn
from orchestrator.core.host import procfs
from orchestrator.core.jobdir.layout import JobDir
from tests.support import fake_host

pytestmark = pytest.mark.slow

WAIT_S_MAX = 30.0

# An agent in short, in a process of its own: what it stops is all that descends from it.
AGENT = """
import json, os, sys, time
from pathlib import Path
from orchestrator.agent.ranks import spawn
from orchestrator.agent.ranks.processes import NodeRanks
from orchestrator.agent.ranks.rank_start import NodeEnvironment, RankStart
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.settings.rank_settings import EnvLayers, SetBy, Setting
from orchestrator.core.jobdir.layout import JobDir
from tests.support import jobs

root, script, grace_s = sys.argv[1:]
job = JobDir(Path(root))
spawn.adopt_orphans()
settings = tuple(Setting(name, "default", SetBy.ORCH, "") for name in ("RANK", "MINE", "ORCHS"))
layers = EnvLayers.before_setup(os.environ, {"RANK": "mine", "MINE": "mine"}, {})
made = NodeEnvironment(NodePlan(jobs.plan(), job, "node-0", 1), layers, settings, "bash", "")
program = spawn.Program(("bash", "-c", script), made.build_env({"RANK": "0"}), job.code, job.rank_log(1, 0))
ranks = NodeRanks(1, job, "node-0")
ranks.begin()
ranks.make_files((RankStart(0, 0, program),))
ranks.start((RankStart(0, 0, program),))
print(ranks.processes[0].pid, flush=True)
while "up" not in job.rank_log(1, 0).read_text():
    time.sleep(0.01)
sys.stdin.readline()
began_s = time.monotonic()
ranks.stop(float(grace_s), "asked")
while not ranks.continue_stop(set()):
    pid, status = os.waitpid(-1, os.WNOHANG)
    if (process := ranks.find_by_pid(pid)) is not None:
        ranks.note_exit(process, os.waitstatus_to_exitcode(status), None)
    time.sleep(0.01)
print(json.dumps([ranks.processes[0].exit_code, time.monotonic() - began_s]))
"""


def _agent(folder: Path, script: str, grace_s: float = 0.0) -> tuple[subprocess.Popen[str], int]:
    """Start an agent with one rank; return it, and the rank's pid."""
    JobDir(folder).code.mkdir()
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(folder), script, str(grace_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(ranks_module.__file__).parents[3],
    )  # fmt: skip
    assert agent.stdout is not None
    return agent, int(agent.stdout.readline())


def _stopped(folder: Path, script: str, grace_s: float) -> tuple[int, float, str]:
    """Stop a rank; return its exit code, how long that took, and what the rank printed."""
    agent, rank_pid = _agent(folder, script, grace_s)
    try:
        out, _ = agent.communicate("stop\n", WAIT_S_MAX)
    except subprocess.TimeoutExpired:  # neither ends by itself
        agent.kill()
        os.killpg(rank_pid, signal.SIGKILL)
        raise
    code, took_s = json.loads(out)
    return code, took_s, JobDir(folder).rank_log(1, 0).read_text()


def test_rank_ignoring_term_is_killed_after_grace(tmp_path: Path) -> None:
    code, took_s, _ = _stopped(tmp_path, "trap '' TERM; echo up; while :; do sleep 0.05; done", 0.3)
    assert code == -9 and took_s >= 0.3


SAVES = "trap 'sleep 0.2; echo saved; exit 3' TERM; echo up; while :; do sleep 0.05; done"
SCRIPT = """
import os, signal, subprocess, sys, time

helper = subprocess.Popen(sys.argv[1:])


def save(signum, frame):
    time.sleep(0.2)
    print(helper.poll(), flush=True)
    helper.kill()
    os._exit(3)


signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("line", "code", "log"),
    [
        ("exec {python} -c '{script}' sleep 60", 3, "up\nNone\n"),
        (
            "{python} -c '{script}' {python} -c 'import time; time.sleep(60)' | cat; exit ${{PIPESTATUS[0]}}",
            3,
            "up\nNone\n",
        ),
        ("timeout 60 {python} -c '{script}' sleep 60", 3, "up\nNone\n"),
        ("trap 'echo trapped' TERM; {python} -c '{script}' sleep 60; true", 0, "up\nNone\ntrapped\n"),
        ('trap "exit 4" TERM; sh -c "{saves}" & wait', 4, "up\nsaved\n"),
        ('sh -c "{saves}"; echo more', -15, "up\nsaved\n"),
    ],
    ids=["script", "pipe", "wrapper", "trap", "trap that leaves", "shells alone"],
)
def test_term_goes_to_script_then_kill_to_group(tmp_path: Path, line: str, code: int, log: str) -> None:
    """TERM is for the script of a rank, and KILL after the grace period for its whole group."""
    line = line.format(python=sys.executable, script=SCRIPT, saves=SAVES)
    ended, took_s, printed = _stopped(tmp_path, line, 5.0)
    assert (ended, printed.replace("Terminated\n", "")) == (code, log)
    assert 0.2 <= took_s < 5.0


SHARES = """
import multiprocessing, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
child.start()
print(memory.name, "up", flush=True)
time.sleep(60)
"""


def test_shared_memory_of_killed_rank_is_removed(tmp_path: Path) -> None:
    _, took_s, log = _stopped(tmp_path, f"exec {sys.executable} -c '{SHARES}'", 0.0)
    assert not (Path("/dev/shm") / log.split()[0]).exists() and took_s < procfs.TRACKER_S_MAX


def test_resource_tracker_that_does_not_exit_is_killed(tmp_path: Path) -> None:
    line = 'from signal import *; signal(15, SIG_IGN); print("up", flush=True); pause()  # resource_tracker import main'
    _, took_s, _ = _stopped(tmp_path, f"{sys.executable} -c '{line}' & wait", 0.0)
    assert procfs.TRACKER_S_MAX <= took_s < 2 * procfs.TRACKER_S_MAX


def test_signal_goes_to_stepping_program_after_first_step() -> None:
    """Once steps are made, the signal is for the program that makes them."""
    forks = "import os, time; child = os.fork(); child and print(child, flush=True); time.sleep(60)"
    wraps = "import subprocess, sys; subprocess.call([sys.executable, '-c', sys.argv[1]])"
    first = subprocess.Popen(
        [sys.executable, "-c", wraps, forks], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert first.stdout is not None
    fork = int(first.stdout.readline())
    tree, stat = procfs.children(), procfs.stat(fork)
    assert stat is not None
    assert spawn.find_scripts(first.pid, fork, tree, signal.SIGTERM) == [stat.ppid]
    assert spawn.find_scripts(first.pid, 0, tree, signal.SIGTERM) == [first.pid]
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()


def test_user_value_overrides_default_and_contract_overrides_both(tmp_path: Path) -> None:
    _, _, log = _stopped(tmp_path, 'echo "$RANK $MINE $ORCHS ${PYTHONPATH%%:*}"; echo up', 0.0)
    assert log == f"0 mine default {JobDir(tmp_path).node('node-0')}/hook\nup\n"


def test_a_rank_does_not_outlive_its_agent(tmp_path: Path) -> None:
    agent, rank = _agent(tmp_path, "echo up; sleep 600")
    fake_host.wait_for(lambda: "up" in JobDir(tmp_path).rank_log(1, 0).read_text(), "the rank")
    agent.kill()
    agent.communicate(timeout=WAIT_S_MAX)
    fake_host.wait_gone([rank])
