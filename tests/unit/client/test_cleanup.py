"""What a job left behind, cleared away; and nothing else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.agent.process import agent_monitor
from orchestrator.client import cleanup
from orchestrator.client.job import Job
from orchestrator.core.host import process_tags
from orchestrator.core.jobdir import home, locks
from tests.support import folders, jobs
from tests.support.unprivileged import unprivileged
from tests.unit.client.shelf import Shelf


def test_tidy_removes_only_run_files_and_old_drafts(tmp_path: Path) -> None:
    """Tidying removes only run files of ended jobs and old drafts."""
    ended = folders.failed(tmp_path)
    running = folders.make(tmp_path, [*jobs.submitted(), *jobs.running(1, 1.0, 7)])
    for job in (ended, running):
        (job.root / "nodes" / "node-0").mkdir(parents=True)
    old, new = (tmp_path / "jobs" / f".{home.new_id('gpt', at_s)}" for at_s in (1e9, 1e9 + 1))
    own = tmp_path / "jobs/.archive"  # which a person keeps there
    for folder in (old, new, own):
        folder.mkdir()
    for folder in (old, own):
        os.utime(folder, (1e9, 1e9))
    said = cleanup.clean_local([Job(ended), Job(running)])
    assert said == (f"cleaned up 1 ended job ({ended.id}), removed 1 interrupted submit ({old.name})", {})
    assert not (ended.root / "nodes").exists() and (running.root / "nodes").exists()
    assert not old.exists() and new.exists() and own.exists() and ended.rank_log(1, 1).exists()


def test_tidy_reports_leftovers_with_reason(tmp_path: Path) -> None:
    """Tidying reports what is left and why."""
    job = folders.failed(tmp_path)
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    with unprivileged(tmp_path):
        job.root.chmod(0o555)
        said, left = cleanup.clean_local([Job(job)])
        deleted, undeleted = cleanup.delete_jobs([Job(job)])
        job.root.chmod(0o755)
    assert (said, deleted) == ("", "")
    assert left[job.id].lines()[0].startswith(f"this machine: clean: cannot be deleted: {job.root / 'nodes'}: Perm")
    assert list(undeleted) == [job.id] and "\n  fix: " in undeleted[job.id].lines()[0]


def test_unkillable_process_keeps_its_run_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot be ended keeps its run files."""
    job = folders.failed(tmp_path)
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    monkeypatch.setattr(agent_monitor, "clean_up_processes", lambda tag: [4711])
    said, left = cleanup.clean_local([Job(job)])
    assert said == "" and "process 4711" in left[job.id].lines()[0]
    assert (job.root / "nodes" / "node-0").exists()


@pytest.mark.slow
def test_cleanup_ends_only_leftovers_of_the_job(tmp_path: Path) -> None:
    """A cleanup ends what the job left, and nothing else that it started."""
    job = folders.failed(tmp_path)
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    left = {**os.environ, process_tags.NAME: process_tags.make_tag(job.root, "node-0")}
    with (
        subprocess.Popen(["sleep", "60"]) as other,  # such as the supervisor of another job, revived just now
        subprocess.Popen(["sleep", "60"], env=left) as its_own,
    ):
        said, _ = cleanup.clean_local([Job(job)])
        ended = its_own.wait(10.0), other.poll()
        other.kill()
    assert said.startswith("cleaned up 1 ended job") and ended == (-9, None)


def test_tidy_needs_no_plan(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    job.plan.write_text("{")
    assert cleanup.clean_local([Job(job)])[0].startswith("cleaned up 1 ended job")


def test_partly_deleted_job_can_be_deleted_later(tmp_path: Path) -> None:
    job = Shelf(tmp_path).job
    (job.checkpoints / "step-1.pt").touch()
    with unprivileged(tmp_path):
        job.checkpoints.chmod(0o555)
        assert cleanup.delete_jobs([Job(job)])[0] == ""
        job.checkpoints.chmod(0o755)
    assert job.plan.exists() and job.ended.exists() and list(job.checkpoints.iterdir())
    assert cleanup.delete_jobs([Job(job)])[1] == {} and not job.root.exists()


@pytest.mark.parametrize(
    ("when", "why"),
    [
        ("before", "the job was resumed, so it has not ended"),
        ("meanwhile", "another command is working on the job"),
    ],
)
def test_job_resumed_during_clean_prompt_is_kept(tmp_path: Path, when: str, why: str) -> None:
    """A job that is resumed while clean asks is not deleted."""
    job = folders.failed(tmp_path)
    with locks.hold(job.resume_lock, locks.RESUME_S_MAX) if when == "meanwhile" else contextlib.nullcontext():
        if when == "before":
            job.ended.unlink()
        before = sorted(job.root.iterdir())
        said, left = cleanup.delete_jobs([Job(job)])
    assert said == "" and why in left[job.id].lines()[0]
    assert set(before) <= set(job.root.iterdir())


def test_only_jobs_ended_long_ago_are_deleted(tmp_path: Path) -> None:
    old, new = folders.failed(tmp_path, "old"), folders.failed(tmp_path, "new")
    running = folders.make(tmp_path, jobs.submitted(), "running")
    os.utime(old.ended, (time.time() - 7200,) * 2)
    chosen = cleanup.older_than([Job(old), Job(new), Job(running)], 3600.0)
    assert [job.id for job in chosen] == [old.id]
    assert cleanup.delete_jobs(chosen) == ("deleted 1 job (old)", {})
    assert not old.root.exists() and new.root.exists()
