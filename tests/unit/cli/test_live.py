"""Is whoever watches a job on a pipe told of a suspicion once, and of its end? The supervisor is a thread."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cli import live
from orchestrator.client.job import Job
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.status_file import iso
from tests.support import folders, jobs

RUNNING = [*jobs.submitted(), *jobs.running(1, 1.0, 7)]
STATUS_S = 0.02
SHOWN_S = 0.2
"""Each status stays for so long: many looks of whoever watches."""

ALONE = {"notices": ["4 ranks train alone; fix: form one"]}
STOPPED = {"what": "", "ranks": [2], "node": "node-1", "follows": "ends", "spare": ""}
STAGES = (
    {"suspicion": None, **ALONE},
    {"suspicion": "rank 2 is stopped for 1 s", "suspected": {**STOPPED, "for_s": 1.0, "in_s": 4.0}, **ALONE},
    {"suspicion": "rank 2 is stopped for 3 s", "suspected": {**STOPPED, "for_s": 3.0, "in_s": 2.0}, **ALONE},
    {"suspicion": None},
    {"suspicion": None, "state": "SUCCEEDED"},
)


def _play(job: JobDir) -> None:
    """Hold the job's lock as a supervisor does, and write one status after the other."""
    known = json.loads(job.state.read_text())
    for stage in STAGES:
        replace_text(job.state, json.dumps({**known, "written_at": iso(time.time()), **stage}))
        time.sleep(SHOWN_S)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever watches look often."""
    monkeypatch.setattr(live, "STATUS_S", STATUS_S)


def _watched(folder: Path, watch: Callable[[Job], object], capsys: pytest.CaptureFixture[str]) -> list[str]:
    job = folders.make(folder, RUNNING)
    known = json.loads(job.state.read_text())
    replace_text(job.state, json.dumps({**known, "written_at": iso(time.time())}))
    with job.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=_play, args=(job,))
        thread.start()
        watch(Job(job))
        thread.join()
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_suspicion_and_its_end_are_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _watched(tmp_path, live.watch, capsys)
    told = [line for line in lines if not line.startswith("── ")]
    assert told == ["notice      4 ranks train alone", "            fix: form one"]
    lines = [line for line in lines if line.startswith("── ")]
    said = [line.rpartition("  ")[2] for line in lines]
    assert len(lines) == 4
    assert (
        said[1].startswith("rank 2 is stopped for 1 s; the attempt ends at ")
        and "; to end it now: orch restart gpt" in said[1]
    )
    assert said[2] == "running again"
    assert "SUCCEEDED" in lines[3]


@pytest.mark.slow
def test_json_follow_has_line_per_suspicion_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _watched(tmp_path, live.print_changes, capsys)
    told = [(one["state"], bool(one["suspicion"])) for one in map(json.loads, lines)]
    assert told == [("RUNNING", False), ("RUNNING", True), ("RUNNING", False), ("SUCCEEDED", False)]


def test_reason_of_attempt_end_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = replace(jobs.status(RUNNING), dir="")
    end = f"crash: rank 1 on node-0: RuntimeError: loss is NaN at {jobs.ROOT}/code/train.py:10 inner"
    job = Job(folders.make(tmp_path, jobs.crashed_once()))
    tell = live._ChangePrinter("gpt", with_end=False)
    assert live._transition_text(job, 2, tell.told) == f"from {jobs.CKPT}; attempt 1 ended: {end}"
    tell(replace(known, state="RESTARTING", reason=end))
    tell(replace(known, state="RESTARTING", attempt=2, reason=f"restarting after {end}"))
    assert live._transition_text(job, 2, tell.told) == f"from {jobs.CKPT}"
    tell(replace(known, state="STOPPING", attempt=2, reason=end))  # the end tells it
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith(end)
    assert "attempt 2" in second and "loss" not in second
    assert "STOPPING" in third and "loss" not in third
