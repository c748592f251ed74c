"""A keeper leases before it starts anything, and starts nothing without `GO`. Real processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.agent.process import agent_monitor
from orchestrator.core import codec
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import locks
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.agent_config import AgentConfig
from tests.support import fake_host

pytestmark = pytest.mark.slow

WAIT_S_MAX = 30.0
PROGRAM = """
import sys, time
from orchestrator.agent.process import agent_monitor
from orchestrator.core.wire import bootstrap

bootstrap.GO_S_MAX = float(sys.argv[1])
agent_monitor.STOPPED_S_MAX = 0.1


def agent(config, pulse):
    print("agent has", config.gpus, flush=True)
    time.sleep(600)


sys.exit(agent_monitor.main(agent, is_launched=True))
"""


class Keeper:
    """A launched keeper, whose agent only sleeps."""

    def __init__(self, folder: Path, go_s_max: float = WAIT_S_MAX, *, without_reader: bool = False) -> None:
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(go_s_max)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=Path(agent_monitor.__file__).parents[2],
            )  # fmt: skip
        if without_reader:
            assert self.process.stdout is not None
            self.process.stdout.close()
        self._write(codec.dumps(_config(folder)).encode())

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def word(self) -> object:
        """Return the next word; None at the end."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_S_MAX)[0], "the keeper says nothing"
        line = self.process.stdout.readline()
        return codec.loads_kind(codec.classes_by_kind(w.Reply), line) if line else None

    def go(self) -> None:
        self._write(w.GO)

    def end(self) -> int:
        """End it, with its agent; return its exit code."""
        self.process.terminate()
        assert self.process.stdin is not None and self.process.stdout is not None
        code = self.process.wait(WAIT_S_MAX)
        self.process.stdin.close()
        self.process.stdout.close()
        return code


def _config(folder: Path) -> AgentConfig:
    return fake_host.config(root=str(folder))


def test_monitor_waits_for_release_then_detaches_and_starts(tmp_path: Path) -> None:
    """The agent monitor waits for its release, then detaches from the connection and starts."""
    one = Keeper(tmp_path)
    assert one.word() == w.Leased(())
    assert not (tmp_path / "nodes/node-0/agent.json").exists()
    one.go()
    assert one.word() == w.AgentMonitorUp(one.process.pid)
    assert one.word() is None, "its standard output has ended: what is printed goes to the log"
    assert Path(f"/proc/{one.process.pid}/fd/0").readlink() == Path(os.devnull)
    one.end()


def test_monitor_without_release_exits(tmp_path: Path) -> None:
    """An agent monitor that is not released exits by itself."""
    one = Keeper(tmp_path, go_s_max=0.1)
    assert one.word() == w.Leased(())
    assert one.word() is None and one.process.wait(WAIT_S_MAX) == 1
    assert "no order to start" in one.log.read_text()
    one.end()


def test_monitor_exits_when_launcher_vanishes(tmp_path: Path) -> None:
    """An agent monitor whose launcher vanishes exits at once."""
    one = Keeper(tmp_path)
    assert one.word() == w.Leased(()) and one.process.stdin is not None
    one.process.stdin.close()
    assert one.process.wait(WAIT_S_MAX) == 1
    assert "has gone before" in one.log.read_text()
    one.end()


def test_monitor_without_reader_exits_without_traceback(tmp_path: Path) -> None:
    """An agent monitor whose output nothing reads exits without a traceback."""
    one = Keeper(tmp_path, without_reader=True)
    assert one.process.stdin is not None
    one.process.stdin.close()
    assert one.process.wait(WAIT_S_MAX) == 1
    assert "has gone before" in one.log.read_text() and "BrokenPipe" not in one.log.read_text()
    one.end()


def test_second_monitor_reports_the_first_and_exits(tmp_path: Path) -> None:
    one = Keeper(tmp_path)
    one.word()
    one.go()
    one.word()
    fake_host.wait_for(lambda: (tmp_path / "nodes/node-0/agent.json").exists(), "the keeper's record")
    other = Keeper(tmp_path)
    assert other.word() == w.AlreadyUp(one.process.pid, ())
    assert other.process.wait(WAIT_S_MAX) == 0
    other.end()
    one.end()


def test_monitor_ended_at_once_leaves_no_agent(tmp_path: Path) -> None:
    one = Keeper(tmp_path)
    one.word()
    one.go()
    one.word()
    code = one.end()
    assert code in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    assert not locks.is_held(tmp_path / "nodes/node-0/agent.lock"), "an agent would hold it"


def test_agent_stopped_for_long_is_continued(tmp_path: Path) -> None:
    one = Keeper(tmp_path)
    one.word()
    one.go()
    one.word()
    fake_host.wait_for(lambda: "agent has" in one.log.read_text(), "the agent")
    (agent,) = procfs.descendants(one.process.pid)
    os.kill(agent, signal.SIGSTOP)
    fake_host.wait_for(lambda: "continued" in one.log.read_text(), "the keeper's word")
    fake_host.wait_for(lambda: (stat := procfs.stat(agent)) is not None and stat.state == "S", "its going on")
    one.end()


def test_monitor_record_has_pid_start_and_gpus(tmp_path: Path) -> None:
    """The record of the agent monitor has PID, start time and GPUs."""
    one = Keeper(tmp_path)
    one.word()
    one.go()
    one.word()
    record = tmp_path / "nodes/node-0/agent.json"
    fake_host.wait_for(record.exists, "the keeper's record")
    data = json.loads(record.read_text())
    assert data["pid"] == one.process.pid and data["gpus"] == [] and data["start_ticks"] > 0
    one.end()


STANDS_STILL_ONCE = """
import sys, time
from pathlib import Path
from orchestrator.agent.process import agent_monitor

agent_monitor.SILENT_S_MIN = 0.0


def agent(config, pulse):
    for _ in range(12):
        pulse()
        time.sleep(0.1)
    if (again := Path(config.root) / "again").exists():
        return 0
    again.touch()
    while True:
        pass


sys.exit(agent_monitor.main(agent))
"""


def test_agent_with_stuck_loop_is_replaced(
    tmp_path: Path,
) -> None:
    config = fake_host.config(root=str(tmp_path), node_timeout_s=1.0)
    done = subprocess.run(
        [sys.executable, "-c", STANDS_STILL_ONCE], input=codec.dumps(config) + "\n", text=True,
        capture_output=True, timeout=WAIT_S_MAX, cwd=Path(agent_monitor.__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("s: replaced") == 1


DIES_ONCE = """
import subprocess, sys
from pathlib import Path
from orchestrator.agent.process import agent_monitor


def agent(config, pulse):
    child, error = Path(config.root) / "child", Path(config.root) / "nodes/node-0/attempt-001/rank-00000/error-7.json"
    if child.exists():
        return 0
    child.write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
    error.parent.mkdir(parents=True)
    error.touch()
    raise ValueError("an agent that dies")


sys.exit(agent_monitor.main(agent))
"""


def test_monitor_restarts_agent_without_log_space(
    tmp_path: Path,
) -> None:
    """The agent monitor cleans up after a dead agent and starts another, even if its log has no space."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", DIES_ONCE], input=codec.dumps(_config(tmp_path)).encode() + b"\n",
            stdout=full, stderr=full, timeout=WAIT_S_MAX, cwd=Path(agent_monitor.__file__).parents[2],
        )  # fmt: skip
    assert done.returncode == 0
    assert procfs.stat(int((tmp_path / "child").read_text())) is None
    assert list(tmp_path.glob("nodes/node-0/attempt-001/rank-00000/*")) == []


STEP = """
import asyncio, signal, sys, time
from orchestrator.agent.process import agent_monitor


def agent(config, pulse):
    signal.signal(signal.SIGTERM, lambda signum, frame: print("warned", flush=True))
    print("agent of", config.node, flush=True)
    while True:
        time.sleep(600)


sys.exit(agent_monitor.main(agent))
"""


def _step(folder: Path) -> subprocess.Popen[bytes]:
    """Start a keeper as srun does."""
    process = subprocess.Popen(
        [sys.executable, "-c", STEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(agent_monitor.__file__).parents[2],
        env={"SLURMD_NODENAME": "gpu-7", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(codec.dumps(fake_host.config(node="", root=str(folder), allocated=True)).encode() + b"\n")
    process.stdin.close()
    return process


def test_term_in_allocation_is_passed_to_agent_only(
    tmp_path: Path,
) -> None:
    """In an allocation TERM ends neither the monitor nor the agent, and the agent is notified."""
    process = _step(tmp_path)
    log = tmp_path / "nodes/gpu-7/agent.log"
    fake_host.wait_for(lambda: log.exists() and "agent of gpu-7" in log.read_text(), "the agent")
    assert process.stdout is not None and process.stdout.readline() == b"orch agent on gpu-7\n"
    process.terminate()
    fake_host.wait_for(lambda: "warned" in log.read_text(), "the agent's word")
    assert process.poll() is None
    agents = procfs.descendants(process.pid)
    process.kill()
    fake_host.wait_gone(agents)
    process.wait(WAIT_S_MAX)
    process.stdout.close()
