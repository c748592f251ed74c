"""Does `Job` say what its folder says, start what died, and refuse what makes no sense? No process is started here."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator import find
from orchestrator.client import job_source
from orchestrator.client.job import Job
from orchestrator.core import codec
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import home, requests, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.submission.supervisor_process import SUBMIT_S_MAX, restart_supervisor
from tests.support import folders, jobs
from tests.support.fake_slurm import SUPERVISOR

RUNNING = [*jobs.submitted(), *jobs.running(1, 1.0, 7)]


@contextmanager
def _supervised(job: JobDir, host: str = "host-1") -> Iterator[None]:
    """Hold the job's lock as a supervisor does."""
    with job.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"4000 {host}\n")
        file.flush()
        yield


def test_status_is_supervisors_with_folder(tmp_path: Path) -> None:
    job = Job(folders.succeeded(tmp_path))
    status = job.status()
    assert (status["id"], status["state"], status["dir"]) == (job.id, "SUCCEEDED", str(job.folder.root))
    assert job.wait(0.0)["state"] == "SUCCEEDED"
    assert repr(job) == f"<Job {job.id} SUCCEEDED>"


def test_status_replaced_while_watched_is_not_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status that is replaced while it is watched is not stale, whatever the clocks say."""
    job = Job(folders.make(tmp_path, RUNNING))
    status = status_file.loads(job.folder.state.read_bytes())
    old, new = (dataclasses.replace(status, written_at=status_file.iso(time.time() - at_s)) for at_s in (60, 59))
    status_file.write(job.folder, old, durable=False)
    assert job.source.written_status().is_late, "its supervisor has stopped"
    monkeypatch.setattr(job_source, "REWRITE_S_MAX", 10.0)
    writer = threading.Timer(0.1, status_file.write, (job.folder, new), {"durable": False})
    writer.start()
    assert not job.source.written_status().is_late
    writer.join()


def test_job_is_found_as_on_command_line(tmp_path: Path) -> None:
    folder = folders.succeeded(tmp_path, "bert")
    assert find("bert", {"ORCH_HOME": str(tmp_path)}).id == folder.id


def test_ended_or_supervised_job_is_not_revived(tmp_path: Path) -> None:
    assert restart_supervisor(folders.succeeded(tmp_path)) == ""
    running = folders.make(tmp_path, RUNNING)
    with _supervised(running):
        assert restart_supervisor(running) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("age_s", "is_left_alone"), [(SUBMIT_S_MAX - 10, True), (SUBMIT_S_MAX + 1, False)])
def test_job_during_submit_is_left_alone(tmp_path: Path, age_s: float, is_left_alone: bool) -> None:
    fresh = folders.make(tmp_path, jobs.submitted())
    fresh.bundle.write_text(SUPERVISOR)
    planned_s = time.time() - age_s
    os.utime(fresh.plan, (planned_s, planned_s))
    assert (restart_supervisor(fresh) == "") is is_left_alone
    assert fresh.ended.exists() is not is_left_alone


def test_supervisor_of_other_machine_is_named_not_replaced(tmp_path: Path) -> None:
    """A supervisor of another machine is left alone and named."""
    running = folders.make(tmp_path, RUNNING)
    running.lock.write_text("4711 gpu-03\n")
    assert restart_supervisor(running) == ""
    status = status_file.to_json(Job(running).source.status())
    assert status["supervisor"] == {"pid": 4711, "host": "gpu-03"}
    assert status["written_s"] > 1000 and "full_disk" not in status


def test_full_disk_explains_missing_status_updates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A supervisor that cannot write its status is recognised by its full disk."""
    running = folders.make(tmp_path, RUNNING)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 9, 0, 0, 9, 9, 9, 0, 255)))
    assert status_file.to_json(Job(running).source.status())["full_disk"] == str(running.root)


def test_copied_job_shows_origin_and_accepts_no_action(tmp_path: Path) -> None:
    """A copy shows of which job it is one, and no action is possible on it."""
    job = folders.failed(tmp_path / "a")
    home.record_origin(job, job.root)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = Job(JobDir(tmp_path / "b" / "jobs" / job.id))
    assert copy.status()["copy_of"] == str(job.root) and "copy_of" not in Job(job).status()
    for act in (copy.resume, lambda: requests.send(copy.folder.requests, "cancel")):
        with pytest.raises(UserError, match="it is a copy of"):
            act()


def test_folder_without_job_is_not_revived(tmp_path: Path) -> None:
    running = folders.make(tmp_path, RUNNING)
    running.plan.unlink()
    assert restart_supervisor(running) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_other_users_job_is_not_revived(tmp_path: Path) -> None:
    running = folders.make(tmp_path, RUNNING)
    os.chown(running.plan, 12345, 12345)
    assert restart_supervisor(running) == ""


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"state": "RUNNING"}', "\udcff", '{"a": NaN'])
def test_damaged_status_file_is_reported(tmp_path: Path, text: str) -> None:
    folder = folders.succeeded(tmp_path)
    folder.state.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ClusterError, match="the status file is damaged") as told:
        Job(folder).status()
    assert told.value.fix


def test_status_with_torn_nodes_or_ranks_is_damaged(tmp_path: Path) -> None:
    folder = folders.succeeded(tmp_path)
    whole = json.loads(folder.state.read_text())
    torns: list[dict[str, object]] = [
        {"nodes": [{}]},
        {"ranks": [1]},
        {"ranks": None},
        {"started_at": "noon"},
        {"written_at": None},
    ]
    for torn in torns:
        folder.state.write_text(json.dumps({**whole, **torn}))
        with pytest.raises(ClusterError, match="damaged"):
            status_file.to_json(Job(folder).source.status())


def test_missing_status_of_ended_job_is_not_awaited(tmp_path: Path) -> None:
    """A missing status file of an ended job is not waited for."""
    folder = folders.succeeded(tmp_path)
    folder.state.unlink()
    with pytest.raises(ClusterError, match="missing"):
        Job(folder).status()
    folder.plan.unlink()
    with pytest.raises(ClusterError, match="not a complete job folder"):
        Job(folder).status()


@pytest.mark.parametrize("damage", ["", '{"id": "x"', "{}", "[1]"])
def test_damaged_plan_is_reported(tmp_path: Path, damage: str) -> None:
    folder = folders.succeeded(tmp_path)
    folder.plan.write_text(damage)
    for ask in (Job(folder).plan, Job(folder).why):
        with pytest.raises(ClusterError, match="the job's plan is damaged"):
            ask()


def test_secrets_are_masked_and_damaged_ones_not_guessed(tmp_path: Path) -> None:
    job = Job(folders.failed(tmp_path))
    assert job.mask().apply(f"token {folders.SECRET}") == "token ***"
    with job.folder.rank_log(1, 0).open("a") as log:
        log.write(f"prints {folders.SECRET}\n")
    assert "prints ***" in [line.text for line in job.logs()]
    (job.folder.secrets / "secrets.json").write_text("{")
    with pytest.raises(ClusterError, match="cannot be masked"):
        job.mask()
    (job.folder.secrets / "secrets.json").unlink()
    job.folder.plan.write_text(codec.dumps(dataclasses.replace(job.plan(), secrets=("HF_TOKEN",))))
    with pytest.raises(ClusterError, match="cannot be masked"):
        job.mask()


def test_ended_job_refuses_cancel_and_running_one_resume(tmp_path: Path) -> None:
    """Ended jobs cannot be cancelled, and running ones cannot be resumed."""
    for folder in (folders.succeeded(tmp_path), folders.failed(tmp_path)):
        with pytest.raises(UserError, match=r"has ended already .*nothing to cancel"):
            Job(folder).cancel()
    running = folders.make(tmp_path, RUNNING)
    with _supervised(running), pytest.raises(UserError, match="the job is RUNNING"):
        Job(running).resume()


def test_cancel_of_running_job_is_requested_from_supervisor(tmp_path: Path) -> None:
    running = folders.make(tmp_path, RUNNING)
    with _supervised(running):
        Job(running).cancel()
    assert [json.loads(path.read_text())["ask"] for path in sorted(running.requests.glob("*.json"))] == ["cancel"]


def test_succeeded_job_resumes_only_with_new_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is left to do") as told:
        Job(folders.succeeded(tmp_path)).resume()
    assert "--set" in told.value.fix and "--from" in told.value.fix


def test_timed_out_wait_shows_job_state(tmp_path: Path) -> None:
    """A wait that is too short shows what the job does."""
    running = folders.make(tmp_path, RUNNING)
    with _supervised(running), pytest.raises(TimeoutError, match="is still RUNNING after 0 s"):
        Job(running).wait(0.0)
