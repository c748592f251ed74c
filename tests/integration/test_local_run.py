"""Does a script run without a job file, from a shell and from Python, as it would with one?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import orchestrator
from tests.support.local import Desk, Sight, wait_until

RUN_S_MAX = 120.0
SCRIPT = """
import os, sys, time
print("rank", os.environ["RANK"], sys.argv[1:], os.environ.get("NOTE"), flush=True)
if "--wait" in sys.argv:
    time.sleep(600)
"""


def _job_of(desk: Desk) -> Sight:
    sight = Sight(orchestrator.find(None, desk.environ), desk.environ)
    desk.jobs.append(sight)
    return sight


def _argv(*words: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.cli", "run", *words]


def test_a_line_runs_a_script_and_shows_its_output(desk: Desk) -> None:
    (desk.folder / "train.py").write_text(SCRIPT)
    argv = _argv("--procs", "2", "--env", "NOTE=hi", "train.py", "--nodes", "two words")
    done = subprocess.run(
        argv, cwd=desk.folder, env=desk.environ, capture_output=True, text=True, timeout=RUN_S_MAX
    )
    job = _job_of(desk)
    assert done.returncode == 0, done.stderr
    assert "rank 1 ['--nodes', 'two words'] hi" in done.stdout
    assert done.stdout.startswith("submitted train-") and "SUCCEEDED" in done.stdout
    assert job.job.folder.spec.read_text() == (
        "# Written by: orch run --procs 2 --env NOTE=hi train.py --nodes 'two words'\n"
        "name: train\nprocs_per_node: 2\nentrypoint: [train.py, --nodes, two words]\nenv:\n  NOTE: hi\n"
    )


def test_an_interrupt_leaves_the_job_running_and_says_so(desk: Desk) -> None:
    (desk.folder / "train.py").write_text(SCRIPT)
    with subprocess.Popen(
        _argv("--procs", "1", "train.py", "--wait"), cwd=desk.folder, env=desk.environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        jobs = Path(desk.environ["ORCH_HOME"]) / "jobs"
        wait_until(
            lambda: jobs.is_dir() and any(not path.name.startswith(".") for path in jobs.iterdir()), "a job"
        )
        job = _job_of(desk)
        job.wait_for_line("rank 0")
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=RUN_S_MAX)
    assert process.returncode == 130
    assert f"detached: {job.job.id} goes on" in err
    assert f"orch cancel {job.job.id}" in err
    job.wait_for_state("RUNNING")
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"


def test_python_runs_a_script_and_resumes_it_when_its_session_is_over(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk.folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(desk.folder)
    for name, value in desk.environ.items():
        monkeypatch.setenv(name, value)
    job = orchestrator.run("train.py", "--lr", 0.1, procs=2, env={"NOTE": 7}, name="first")
    desk.jobs.append(Sight(job, desk.environ))
    said = capsys.readouterr().out
    assert "rank 0 ['--lr', '0.1'] 7" in said and "SUCCEEDED" in said
    assert orchestrator.follow(job) == job
    limited = orchestrator.run(
        "train.py --wait",
        procs=1,
        name="limited",
        set={"time_limit": "2s", "monitor.stop_grace": "1s"},
        follow=False,
    )
    desk.jobs.append(Sight(limited, desk.environ))
    status = limited.wait(RUN_S_MAX)
    assert (status["state"], "time limit" in status["reason"]) == ("FAILED", True)
    orchestrator.find("limited").resume(overrides=["entrypoint=train.py"])
    assert orchestrator.find("limited").wait(RUN_S_MAX)["state"] == "SUCCEEDED"
    assert json.loads(limited.folder.overrides.read_text()) == ["entrypoint=train.py"]
