"""Local backend: what agents get on standard input, and when one counts as dead."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.local import LocalBackend
from orchestrator.core.jobdir.layout import JobDir
from tests.support import fake_host

SCRIPT = 'echo "$0 $@" >argv; env >environ; cat >told.part; mv told.part told\n'


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    job = JobDir(tmp_path)
    job.scripts.mkdir()
    (job.scripts / "node-0.sh").write_text(SCRIPT)
    return job


@pytest.mark.slow
def test_agent_gets_token_on_stdin_only(job: JobDir) -> None:
    """An agent gets its token on standard input only."""
    config = fake_host.config(root=str(job.root))
    LocalBackend(job).launch(config)
    fake_host.wait_for((job.root / "told").exists, "what the agent was told")
    assert config.token in (job.root / "told").read_text()
    for name in ("argv", "environ"):
        assert config.token not in (job.root / name).read_text()


def test_agent_with_lock_or_recent_launch_is_alive(
    job: JobDir,
) -> None:
    """An agent that holds its lock is alive; one launched a moment ago may not hold it yet."""
    backend, folder = LocalBackend(job), job.node("node-0")
    folder.mkdir(parents=True)
    (folder / "agent.log").write_text("its last words\n")
    with (folder / "agent.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [backend.agent_death("node-0") for _ in range(3)] == [None, None, None]
    assert [backend.agent_death("node-0") for _ in range(2)] == [None, "its agent ended; its last words"]


def test_pipe_instead_of_node_log_does_not_block(job: JobDir) -> None:
    """A pipe in place of a node's log is not waited for."""
    backend, folder = LocalBackend(job), job.node("node-0")
    folder.mkdir(parents=True)
    os.mkfifo(folder / "agent.log")
    with pytest.raises(LaunchError, match=r"agent\.log"):
        backend.launch(fake_host.config(root=str(job.root)))
    assert [backend.agent_death("node-0") for _ in range(2)] == [None, "its agent ended; no output"]
