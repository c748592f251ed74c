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


def test_a_pending_job_is_queued_with_slurms_reason_and_expected_start(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.queue(PENDING)
    status = Job(job(tmp_path, "7")).status()
    assert (status["state"], status["attempt"], status["world_size"]) == ("QUEUED", 1, 4)
    assert status["reason"] == "Slurm job 7 waits in the queue: Resources"
    told = status["queue"]
    assert {key: told[key] for key in ("id", "state", "reason", "expected_start", "nodes", "by")} == {
        "id": "7", "state": "PENDING", "reason": "Resources", "expected_start": "2026-11-21T06:26:01Z",
        "nodes": "", "by": "",
    }  # fmt: skip


def test_the_queue_line_says_when_it_will_start_and_how_to_let_it_go(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
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


def test_a_job_with_nodes_and_no_word_of_its_supervisor_is_starting(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    folder.batch_log.write_text("orch: no Python >= 3.10 on node1\n\n")
    status = Job(folder).status()
    assert status["state"] == "STARTING"
    assert status["reason"].endswith("last line of its batch script: orch: no Python >= 3.10 on node1")


def test_while_a_supervisor_speaks_its_word_counts(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    tell(folder, "RUNNING", step=12)
    status = Job(folder).status()
    assert (status["state"], status["step"], status["queue"]["nodes"]) == ("RUNNING", 12, "node[1-2]")


def test_a_job_that_slurm_requeued_by_itself_is_queued_whatever_its_last_supervisor_said(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.queue(PENDING)
    folder = job(tmp_path, "7")
    tell(folder, "RUNNING", step=12, steps_per_s=3.0)
    status = Job(folder).status()
    assert (status["state"], status["step"], status["steps_per_s"]) == ("QUEUED", 12, None)


def test_why_a_requeued_job_waits_again_is_still_told(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(PENDING.replace("Resources", "BeginTime"))
    folder = job(tmp_path, "7")
    tell(folder, "QUEUED", reason="waiting in the queue for nodes again; preempted")
    assert Job(folder).status()["reason"] == "waiting in the queue for nodes again; preempted"
    assert "BeginTime" in shown(folder)


def test_a_slurm_that_is_down_is_said_and_ends_nothing(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.down()
    folder = job(tmp_path, "7")
    text = shown(folder)
    assert "\nQUEUED " in text and "no answer now: slurm_load_jobs error: Unable to contact" in text
    tell(folder, "RUNNING")
    assert Job(folder).status()["state"] == "RUNNING"
    assert asked(folder) == []


def test_all_jobs_are_asked_for_at_once(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.queue(PENDING, RUNNING.replace("7|", "8|", 1))
    job(tmp_path, "7", name="one", at_s=BEGAN_S)
    tell(job(tmp_path, "3", "8", name="two", at_s=BEGAN_S + 60), "RUNNING")
    assert app.run(["status", "--all", "--json"]) == 0
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == ["QUEUED", "RUNNING"]
    assert [call.rpartition(" ")[2] for call in slurm.calls("squeue")] == ["7,8"]


# The end


def test_a_job_that_slurm_has_ended_is_closed_once_with_slurms_words(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
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


def test_two_who_look_at_once_close_a_job_once(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(CANCELLED)
    folder = job(tmp_path, "7")
    slow = folder.bundle.read_text().replace(
        '(job / "ended")', 'import time; time.sleep(0.5); (job / "ended")'
    )
    folder.bundle.write_text(slow)
    both = [threading.Thread(target=slurm_status.SlurmSource(folder).settle) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert [one["cause"] for one in asked(folder)] == ["cancelled"]
    assert (folder.root / "started").read_text() == "x"


def test_a_closing_that_was_cut_off_goes_on_with_the_same_request(slurm: FakeSlurm, tmp_path: Path) -> None:
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


def test_a_job_that_slurm_forgot_is_closed_unless_its_folder_moves(slurm: FakeSlurm, tmp_path: Path) -> None:
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
    assert [one["allocation"] for one in asked(alive)] == ["7"], (
        "how often it was requeued nobody knows any more"
    )


def test_a_job_that_squeue_does_not_list_is_not_closed_while_scontrol_is_silent(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_status, "STILL_S", 0.0)
    slurm.says("squeue.out", "", UNKNOWN_ID, 1)
    slurm.says("scontrol.job", "", "Unable to contact slurm controller (connect failure)\n", 1)
    folder = job(tmp_path, "7")
    Job(folder).source.settle()
    assert asked(folder) == []


@pytest.mark.parametrize(
    "line", [PENDING, HELD, RUNNING, COMPLETING, "7|SUSPENDED|N/A|2|node1|None", "7|NEW|N/A|2||x"]
)
def test_a_job_that_may_go_on_is_not_closed(slurm: FakeSlurm, tmp_path: Path, line: str) -> None:
    slurm.queue(line)
    folder = job(tmp_path, "7")
    Job(folder).source.settle()
    assert asked(folder) == []


def test_a_job_that_was_put_back_into_the_queue_meanwhile_is_not_closed(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.queue(FAILED)
    slurm.says("scontrol.job", SHOWN.replace("=FAILED", "=PENDING"))
    folder = job(tmp_path, "7")
    Job(folder).source.settle()
    assert asked(folder) == []


def test_nobody_starts_a_supervisor_for_a_job_that_slurm_has(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    assert restart_supervisor(folder) == ""
    assert app.run(["logs", folder.id]) == 0
    assert not (folder.root / "started").exists()


def test_a_submit_that_was_cut_off_before_slurm_had_the_job_is_closed_in_time(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
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
def test_another_users_job_is_only_looked_at(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(CANCELLED)
    folder = job(tmp_path, "7")
    os.chown(folder.plan, 12345, 12345)
    assert Job(folder).status()["queue"]["state"] == "CANCELLED"
    assert asked(folder) == []


@pytest.mark.parametrize("text", ["", "{", "{}", "[7]", '["7;rm"]', '"7"', "\udcff"])
def test_damaged_ids_are_told_and_ask_slurm_for_nothing(slurm: FakeSlurm, tmp_path: Path, text: str) -> None:
    folder = job(tmp_path, "7")
    folder.slurm.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ClusterError, match="Slurm's ids of the job") as told:
        Job(folder).status()
    assert told.value.fix
    assert slurm.calls() == []


# Cancel and resume


def test_a_pending_job_is_cancelled_in_the_queue_and_closed(slurm: FakeSlurm, tmp_path: Path) -> None:
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


def test_a_running_jobs_supervisor_is_asked_and_slurm_only_when_it_does_not_obey(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
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


def test_a_cancelled_job_that_comes_back_into_the_queue_is_taken_out(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    tell(folder, "RUNNING")
    Job(folder).cancel()
    slurm.queue(PENDING)
    slurm_status.QUEUE.invalidate()
    assert Job(folder).status()["state"] == "STOPPING"
    assert slurm.calls("scancel") == ["scancel 7"]


def test_a_scancel_that_slurm_refuses_is_told_in_its_words(slurm: FakeSlurm, tmp_path: Path) -> None:
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


def test_a_resumed_job_waits_and_its_last_end_does_not_show(slurm: FakeSlurm, tmp_path: Path) -> None:
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


def test_what_the_batch_script_said_is_shown_where_no_rank_has_printed_anything(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    folder.secrets.mkdir()
    (folder.secrets / "secrets.json").write_text('{"HF_TOKEN": "hf_0123456789abcdef"}')
    folder.batch_log.write_text("slurmstepd: error: \x1b[31mno space left for hf_0123456789abcdef\n")
    assert app.run(["logs", folder.id]) == 0
    said = capsys.readouterr()
    assert said.out == "slurmstepd: error: \\x1b[31mno space left for ***\n"
    assert str(folder.batch_log) in said.err


def test_a_long_batch_log_is_shown_from_a_whole_line_on_or_half_a_secret_would_be(tmp_path: Path) -> None:
    folder, secret = job(tmp_path, "7"), "h\u00fctte-0123456789".encode()
    folder.secrets.mkdir()
    (folder.secrets / "secrets.json").write_bytes(b'{"HF_TOKEN": "%s"}' % secret)
    half = secret[2:] + b"\n"  # it begins within a character
    folder.batch_log.write_bytes(
        secret[:2] + half + b"last\n".rjust(slurm_status.BATCH_LOG_BYTES_MAX - len(half), b".")
    )
    assert [line.strip(".") for line in slurm_status.SlurmSource(folder).batch_lines()] == ["last"]


def test_no_secret_in_the_last_words_of_a_batch_script_is_told_nor_half_of_one(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
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
