"""A supervisor's deeds: agents find it, also when it came up on a full disk, and what backends say is masked."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.brain.brain import Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.supervisor import translation
from orchestrator.supervisor.agent_connections import AgentConnections
from orchestrator.supervisor.executor import Executor
from orchestrator.supervisor.transfers.transfers import Transfers
from tests.support import jobs
from tests.support.fake_backend import SECRET, Backend

OLD, NEW = "127.0.0.1:4000", "127.0.0.1:4001"


def _deeds(job: JobDir, backend: Backend) -> Executor:
    plan = jobs.plan()
    links, ferry = AgentConnections(plan.id, "token", ()), Transfers(job, plan, None, lambda: "")
    return Executor(
        job, plan, translation.JobSecrets("token", "", {}, {"HF_TOKEN": SECRET}), backend, links, ferry
    )


def _refuse(fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_an_old_word_that_still_holds_is_renewed_and_another_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = JobDir(tmp_path)
    job.endpoint.write_text(OLD)
    os.utime(job.endpoint, (1.0, 1.0))
    deeds = _deeds(job, Backend())
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _refuse)
        deeds.endpoint = OLD
        deeds.say_where()
        assert job.endpoint.stat().st_mtime > 1.0 and job.endpoint.read_text() == OLD
        deeds.endpoint = NEW
        deeds.say_where()
        deeds.go_on(tuple, 1.0)
        assert job.endpoint.read_text() == OLD
    deeds.go_on(tuple, 2.0)
    assert job.endpoint.read_text() == NEW
    deeds.close()


def test_what_a_backend_says_of_a_node_is_masked(tmp_path: Path) -> None:
    brain, words = Brain(), f"its last words: no access with {SECRET}"
    for news in (*jobs.submitted(), d.Launch(1.0, "needed", 1, "node-0")):
        brain.learn(news)
    deeds = _deeds(JobDir(tmp_path), Backend([], [("node-1", LaunchError("process", words))], words, words))
    failed, gone = deeds.look(brain.facts, 2.0)
    masked = "its last words: no access with ***"
    assert isinstance(failed, e.LaunchFailed) and failed.reason == masked
    assert gone == e.AgentDied(2.0, "node-0", masked)
    assert set(deeds.reasons(brain.facts).values()) == {masked}
    deeds.close()
