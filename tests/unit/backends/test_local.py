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
def test_an_agent_is_told_its_token_on_standard_input_alone(job: JobDir) -> None:
    config = fake_host.config(root=str(job.root))
    LocalBackend(job).launch(config)
    fake_host.wait_for((job.root / "told").exists, "what the agent was told")
    assert config.token in (job.root / "told").read_text()
    for name in ("argv", "environ"):
        assert config.token not in (job.root / name).read_text()


def test_an_agent_that_holds_its_lock_is_not_gone_and_one_that_was_launched_a_moment_ago_may_not_hold_it_yet(
    job: JobDir,
) -> None:
    backend, folder = LocalBackend(job), job.node("node-0")
    folder.mkdir(parents=True)
    (folder / "agent.log").write_text("its last words\n")
    with (folder / "agent.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [backend.agent_death("node-0") for _ in range(3)] == [None, None, None]
    assert [backend.agent_death("node-0") for _ in range(2)] == [None, "its agent ended; its last words"]


def test_a_pipe_in_place_of_a_node_s_log_is_not_waited_for(job: JobDir) -> None:
    backend, folder = LocalBackend(job), job.node("node-0")
    folder.mkdir(parents=True)
    os.mkfifo(folder / "agent.log")
    with pytest.raises(LaunchError, match=r"agent\.log"):
        backend.launch(fake_host.config(root=str(job.root)))
    assert [backend.agent_death("node-0") for _ in range(2)] == [None, "its agent ended; no output"]
