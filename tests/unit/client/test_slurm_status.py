"""Do a job's folder and Slurm's queue make one truth, and is a job closed when, and only when, Slurm has ended it?"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from orchestrator.cli import app
from orchestrator.client import slurm_status
from orchestrator.client.job import Job
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.submission.supervisor_process import restart_supervisor
from tests.support.fake_slurm import (
    CANCELLED,
    COMPLETING,
    FAILED,
    HELD,
    PENDING,
    RUNNING,
    SHOWN,
    UNKNOWN_ID,
    FakeSlurm,
    asked,
    job,
    shown,
    tell,
)
from tests.support.jobs import BEGAN_S

pytestmark = pytest.mark.slow

DENIED = "scancel: error: Kill job error on job id 7: Access/permission denied\n"


def test_pending_job_is_queued_with_reason_and_start(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A pending job is queued with Slurm's reason and expected start."""
    slurm.queue(PENDING)
    status = Job(job(tmp_path, "7")).status()
    assert (status["state"], status["attempt"], status["world_size"]) == ("QUEUED", 1, 4)
    assert status["reason"] == "Slurm job 7 waits in the queue: Resources"
    told = status["queue"]
    assert {key: told[key] for key in ("id", "state", "reason", "expected_start", "nodes", "by")} == {
        "id": "7", "state": "PENDING", "reason": "Resources", "expected_start": "2026-11-21T06:26:01Z",
        "nodes": "", "by": "",
    }  # fmt: skip


def test_queue_line_shows_start_time_and_release_command(slurm: FakeSlurm, tmp_path: Path) -> None:
    """The queue line says when the job will start and how to release it."""
    folder = job(tmp_path, "7")
    slurm.queue(PENDING)
    assert shown(folder).splitlines() == [
        f"{folder.id}  4 ranks, slurm",
        "QUEUED  attempt 1",
        ("queue       Slurm job 7 waits in the queue: Resources, expected to start at 2026-11-21 06:26 UTC"),
    ]
    slurm.queue(HELD)
    slurm_status.QUEUE.invalidate()
    assert "            fix: scontrol release 7" in shown(folder)


def test_allocated_job_without_supervisor_report_is_starting(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A job with nodes whose supervisor has not reported yet is starting."""
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    folder.batch_log.write_text("orch: no Python >= 3.10 on node1\n\n")
    status = Job(folder).status()
    assert status["state"] == "STARTING"
    assert status["reason"].endswith("last line of its batch script: orch: no Python >= 3.10 on node1")


def test_status_of_living_supervisor_counts(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    tell(folder, "RUNNING", step=12)
    status = Job(folder).status()
    assert (status["state"], status["step"], status["queue"]["nodes"]) == ("RUNNING", 12, "node[1-2]")


def test_job_requeued_by_slurm_is_queued(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A job that Slurm requeued by itself is queued, whatever its last supervisor reported."""
    slurm.queue(PENDING)
    folder = job(tmp_path, "7")
    tell(folder, "RUNNING", step=12, steps_per_s=3.0)
    status = Job(folder).status()
    assert (status["state"], status["step"], status["steps_per_s"]) == ("QUEUED", 12, None)


def test_reason_of_requeued_job_is_still_shown(slurm: FakeSlurm, tmp_path: Path) -> None:
    """The reason why a requeued job waits again is still shown."""
    slurm.queue(PENDING.replace("Resources", "BeginTime"))
    folder = job(tmp_path, "7")
    tell(folder, "QUEUED", reason="waiting in the queue for nodes again; preempted")
    assert Job(folder).status()["reason"] == "waiting in the queue for nodes again; preempted"
    assert "BeginTime" in shown(folder)


def test_slurm_outage_is_reported_and_ends_nothing(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.down()
    folder = job(tmp_path, "7")
    text = shown(folder)
    assert "\nQUEUED " in text and "no answer now: slurm_load_jobs error: Unable to contact" in text
    tell(folder, "RUNNING")
    assert Job(folder).status()["state"] == "RUNNING"
    assert asked(folder) == []


def test_all_jobs_are_queried_at_once(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.queue(PENDING, RUNNING.replace("7|", "8|", 1))
    job(tmp_path, "7", name="one", at_s=BEGAN_S)
    tell(job(tmp_path, "3", "8", name="two", at_s=BEGAN_S + 60), "RUNNING")
    assert app.run(["status", "--all", "--json"]) == 0
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == ["QUEUED", "RUNNING"]
    assert [call.rpartition(" ")[2] for call in slurm.calls("squeue")] == ["7,8"]


# The end


def test_job_ended_by_slurm_is_closed_once(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(FAILED)
    slurm.says("scontrol.job", SHOWN)
    folder = job(tmp_path, "7")
    folder.batch_log.write_text("orch: no Python >= 3.10 on node1\n")
    Job(folder).source.settle()
    Job(folder).source.settle()
    assert asked(folder) == [
        {
            "ask": "allocation_ended",
            "allocation": "7.2",
            "cause": "failed",
            "why": "Slurm job 7 has ended with exit code 1: FAILED; last line of its batch script: "
            "orch: no Python >= 3.10 on node1",
        }
    ]
    assert folder.ended.exists()
    assert (folder.root / "started").read_text() == "x"


def test_concurrent_status_commands_close_job_once(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(CANCELLED)
    folder = job(tmp_path, "7")
    slow = folder.bundle.read_text().replace('(job / "ended")', 'import time; time.sleep(0.5); (job / "ended")')
    folder.bundle.write_text(slow)
    both = [threading.Thread(target=slurm_status.SlurmSource(folder).settle) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert [one["cause"] for one in asked(folder)] == ["cancelled"]
    assert (folder.root / "started").read_text() == "x"


def test_interrupted_close_continues_with_same_request(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(FAILED)
    slurm.says("scontrol.job", SHOWN)
    folder = job(tmp_path, "7")
    works = folder.bundle.read_text()
    folder.bundle.write_text("raise SystemExit('no')")
    with pytest.raises(ClusterError):
        slurm_status.SlurmSource(folder).settle()
    folder.bundle.write_text(works)
    slurm_status.SlurmSource(folder).settle()
    assert len(asked(folder)) == 1
    assert folder.ended.exists()


def test_forgotten_job_is_closed_unless_folder_changes(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.says("squeue.out", "", UNKNOWN_ID, 1)
    alive = job(tmp_path, "7")
    tell(alive, "RUNNING")
    over = threading.Event()

    def speak() -> None:
        step = 0
        while not over.wait(0.1):
            step += 1
            tell(alive, "RUNNING", step=step)

    supervisor = threading.Thread(target=speak)
    supervisor.start()
    try:
        Job(alive).source.settle()
        assert asked(alive) == []
    finally:
        over.set()
        supervisor.join()
    Job(alive).source.settle()
    assert [one["why"] for one in asked(alive)] == ["Slurm no longer knows job 7"]
    assert [one["allocation"] for one in asked(alive)] == ["7"], "how often it was requeued nobody knows any more"


def test_silent_scontrol_keeps_unlisted_job_open(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that squeue does not list is not closed while scontrol does not answer."""
    monkeypatch.setattr(slurm_status, "STILL_S", 0.0)
    slurm.says("squeue.out", "", UNKNOWN_ID, 1)
    slurm.says("scontrol.job", "", "Unable to contact slurm controller (connect failure)\n", 1)
    folder = job(tmp_path, "7")
    Job(folder).source.settle()
    assert asked(folder) == []


@pytest.mark.parametrize("line", [PENDING, HELD, RUNNING, COMPLETING, "7|SUSPENDED|N/A|2|node1|None", "7|NEW|N/A|2||x"])
def test_job_that_may_continue_is_not_closed(slurm: FakeSlurm, tmp_path: Path, line: str) -> None:
    slurm.queue(line)
    folder = job(tmp_path, "7")
    Job(folder).source.settle()
    assert asked(folder) == []


def test_job_requeued_meanwhile_is_not_closed(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A job that was put back into the queue meanwhile is not closed."""
    slurm.queue(FAILED)
    slurm.says("scontrol.job", SHOWN.replace("=FAILED", "=PENDING"))
    folder = job(tmp_path, "7")
    Job(folder).source.settle()
    assert asked(folder) == []


def test_no_supervisor_is_started_for_slurm_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    assert restart_supervisor(folder) == ""
    assert app.run(["logs", folder.id]) == 0
    assert not (folder.root / "started").exists()


def test_submit_interrupted_before_slurm_is_closed_in_time(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = job(tmp_path)
    assert Job(folder).status()["reason"] == "it is being submitted to Slurm"
    long_ago_s = time.time() - 2 * slurm_status.SUBMIT_S_MAX
    os.utime(folder.plan, (long_ago_s, long_ago_s))
    Job(folder).source.settle()
    assert [one["why"] for one in asked(folder)] == [
        "its submit was interrupted before Slurm had the job; fix: submit it again"
    ]
    assert slurm.calls() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_other_users_job_is_only_read(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(CANCELLED)
    folder = job(tmp_path, "7")
    os.chown(folder.plan, 12345, 12345)
    assert Job(folder).status()["queue"]["state"] == "CANCELLED"
    assert asked(folder) == []


@pytest.mark.parametrize("text", ["", "{", "{}", "[7]", '["7;rm"]', '"7"', "\udcff"])
def test_damaged_id_is_reported_without_asking_slurm(slurm: FakeSlurm, tmp_path: Path, text: str) -> None:
    """Damaged IDs are reported and ask Slurm for nothing."""
    folder = job(tmp_path, "7")
    folder.slurm.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ClusterError, match="Slurm's ids of the job") as told:
        Job(folder).status()
    assert told.value.fix
    assert slurm.calls() == []


# Cancel and resume


def test_pending_job_is_cancelled_in_queue_and_closed(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(PENDING)
    folder = job(tmp_path, "7")
    slurm.folder.joinpath("scancel").write_text(
        f"#!/bin/sh\necho scancel $* >> {slurm.folder}/calls\necho '{CANCELLED}' > {slurm.folder}/squeue.out\n"
    )
    Job(folder).cancel()
    assert slurm.calls("scancel") == ["scancel 7"]
    assert [(one["ask"], one.get("cause")) for one in asked(folder)] == [
        ("cancel", None),
        ("allocation_ended", "cancelled"),
    ]
    assert folder.ended.exists()


def test_running_job_is_cancelled_by_supervisor_then_slurm(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A running job's supervisor is asked first, and Slurm only if it does not obey."""
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    tell(folder, "RUNNING")
    Job(folder).cancel()
    assert Job(folder).status()["state"] == "RUNNING"
    assert (len(asked(folder)), slurm.calls("scancel")) == (1, [])
    (request,) = folder.requests.glob("*.json")
    long_ago_s = time.time() - 1000
    os.utime(request, (long_ago_s, long_ago_s))
    Job(folder).status()
    Job(folder).status()
    assert slurm.calls("scancel") == ["scancel 7"]


def test_cancelled_job_back_in_queue_is_removed(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    tell(folder, "RUNNING")
    Job(folder).cancel()
    slurm.queue(PENDING)
    slurm_status.QUEUE.invalidate()
    assert Job(folder).status()["state"] == "STOPPING"
    assert slurm.calls("scancel") == ["scancel 7"]


def test_scancel_refusal_is_reported_verbatim(slurm: FakeSlurm, tmp_path: Path) -> None:
    """An scancel that Slurm refuses is reported in its words."""
    slurm.queue(PENDING)
    slurm.says("scancel.out", "", DENIED, 1)
    with pytest.raises(ClusterError, match="Access/permission denied"):
        Job(job(tmp_path, "7")).cancel()


def test_an_ended_job_is_not_cancelled(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = job(tmp_path, "7")
    tell(folder, "FAILED")
    folder.ended.touch()
    with pytest.raises(UserError, match="has ended already"):
        Job(folder).cancel()
    assert slurm.calls() == []


def test_resumed_job_is_waiting_without_last_end(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = job(tmp_path, "7")
    tell(folder, "FAILED", attempt=3, step=40, ended_at="2026-11-21T06:21:01.000Z")
    folder.ended.touch()
    before = Job(folder).source.settled_status()
    folder.slurm.write_text('["7", "9"]')
    folder.ended.unlink()
    slurm_status.SlurmSource(folder).await_resume(before)
    for line in (PENDING, RUNNING):
        slurm.queue(line.replace("7|", "9|", 1))
        slurm_status.QUEUE.invalidate()
        status = Job(folder).status()
        assert (status["state"], status["attempt"], status["step"]) == ("QUEUED", 3, 40)
        assert status["ended_at"] is None


def test_batch_output_is_shown_if_no_rank_printed(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of the batch script is shown where no rank has printed anything."""
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    folder.secrets.mkdir()
    (folder.secrets / "secrets.json").write_text('{"HF_TOKEN": "hf_0123456789abcdef"}')
    folder.batch_log.write_text("slurmstepd: error: \x1b[31mno space left for hf_0123456789abcdef\n")
    assert app.run(["logs", folder.id]) == 0
    said = capsys.readouterr()
    assert said.out == "slurmstepd: error: \\x1b[31mno space left for ***\n"
    assert str(folder.batch_log) in said.err


def test_long_batch_log_starts_at_whole_line(tmp_path: Path) -> None:
    """A long batch log is shown from a whole line on, or half a secret would be."""
    folder, secret = job(tmp_path, "7"), "h\u00fctte-0123456789".encode()
    folder.secrets.mkdir()
    (folder.secrets / "secrets.json").write_bytes(b'{"HF_TOKEN": "%s"}' % secret)
    half = secret[2:] + b"\n"  # it begins within a character
    folder.batch_log.write_bytes(
        secret[:2] + half + b"last\n".rjust(slurm_status.BATCH_LOG_BYTES_MAX - len(half), b".")
    )
    assert [line.strip(".") for line in slurm_status.SlurmSource(folder).batch_lines()] == ["last"]


def test_batch_tail_shows_no_secret_or_part(slurm: FakeSlurm, tmp_path: Path) -> None:
    """The last output of a batch script shows no secret, nor half of one."""
    folder = job(tmp_path, "7")
    folder.secrets.mkdir()
    (folder.secrets / "secrets.json").write_text('{"HF_TOKEN": "hf_0123456789abcdef"}')
    folder.batch_log.write_text(f"{'.' * (slurm_status.BATCH_LINE_CHARS_MAX - 8)}hf_0123456789abcdef\n")
    slurm.queue(RUNNING)
    assert Job(folder).status()["reason"].endswith("....***")
    slurm.queue(FAILED)
    slurm.says("scontrol.job", SHOWN)
    slurm_status.QUEUE.invalidate()
    Job(folder).source.settle()
    assert asked(folder)[0]["why"].endswith("....***")
