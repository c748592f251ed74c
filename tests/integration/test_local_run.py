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
from orchestrator.core.jobdir import status_file
from tests.support.local import FAKE_TORCH, STEPPER, Desk, Sight, kill, wait_until

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


def test_run_line_runs_script_and_shows_output(desk: Desk) -> None:
    (desk.folder / "train.py").write_text(SCRIPT)
    argv = _argv("--procs", "2", "--env", "NOTE=hi", "train.py", "--nodes", "two words")
    done = subprocess.run(argv, cwd=desk.folder, env=desk.environ, capture_output=True, text=True, timeout=RUN_S_MAX)
    job = _job_of(desk)
    assert done.returncode == 0, done.stderr
    assert "rank 1 ['--nodes', 'two words'] hi" in done.stdout
    assert done.stdout.startswith("submitted train-") and "SUCCEEDED" in done.stdout
    assert job.job.folder.spec.read_text() == (
        "# Written by: orch run --procs 2 --env NOTE=hi train.py --nodes 'two words'\n"
        "name: train\nprocs_per_node: 2\nentrypoint: [train.py, --nodes, two words]\nenv:\n  NOTE: hi\n"
    )


def test_run_interrupt_keeps_job_and_says_so(desk: Desk) -> None:
    """An interrupt of orch run leaves the job running and says so."""
    (desk.folder / "train.py").write_text(SCRIPT)
    with subprocess.Popen(
        _argv("--procs", "1", "train.py", "--wait"), cwd=desk.folder, env=desk.environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    ) as process:  # fmt: skip
        jobs = Path(desk.environ["ORCH_HOME"]) / "jobs"
        wait_until(lambda: jobs.is_dir() and any(not path.name.startswith(".") for path in jobs.iterdir()), "a job")
        job = _job_of(desk)
        job.wait_for_line("rank 0")
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=RUN_S_MAX)
    assert process.returncode == 130
    assert f"detached: {job.job.id} keeps running" in err
    assert f"orch cancel {job.job.reference}" in err
    job.wait_for_state("RUNNING")
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"


def test_python_api_runs_and_resumes_script(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python code runs a script and resumes it when its session is over."""
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
    again = ["entrypoint=train.py", "time_limit=2m"]
    orchestrator.find("limited").resume(overrides=again)
    assert orchestrator.find("limited").wait(RUN_S_MAX)["state"] == "SUCCEEDED"
    assert json.loads(limited.folder.overrides.read_text()) == again


STEPS = (
    STEPPER
    + """
start = int(Path(os.environ["ORCH_RESUME_FROM"]).stem.split("-")[1]) if os.environ["ORCH_RESUME_FROM"] else 0
def save(step):
    if rank == 0 and step % 10 == 0:
        folder = Path(os.environ["ORCH_CHECKPOINT_DIR"]) / f"step-{step}"
        folder.mkdir(exist_ok=True)
        (folder / "weights.bin").write_text("x")
run(60 if start else 10000, each_s=0.05, at_step=save, start=start)
"""
)


def test_cut_off_session_job_resumes_as_new_job(
    desk: Desk,
) -> None:
    """A job of a session that was cut off is refused, and a new one resumes from its checkpoint."""
    job = desk.submit({**FAKE_TORCH, "train.py": STEPS}, entrypoint="train.py", checkpoint={"path": "step-*"})
    wait_until(lambda: job.seen()["checkpoint"], "a checkpoint")
    _cut_off(job)
    with pytest.raises(
        orchestrator.UserError, match=r"the job is RUNNING on the-old-machine, last update \d+ s ago"
    ) as told:
        job.job.resume()
    assert f"orch resume it --from a checkpoint in {job.job.folder.checkpoints}" in told.value.fix
    _age(job.job.folder.state)
    assert "if that machine is gone, orch resume explains how to continue" in _status_text(desk)
    new = desk.submit({**FAKE_TORCH, "train.py": STEPS}, entrypoint="train.py", checkpoint={"path": "step-*"})
    new.job.cancel()
    new.wait()
    wait_until(new.job.folder.ended.exists, "the supervisor's last line")
    saved = min(job.job.folder.checkpoints.glob("step-*"))
    new.job.resume(str(saved))
    assert new.wait()["state"] == "SUCCEEDED"


def _cut_off(job: Sight) -> None:
    """Kill all of a job at once, and let its folder look as if another machine had run it."""
    job.kill_supervisor()
    for proc in job.processes():
        kill(proc)
    wait_until(lambda: not job.processes(), "the end of all processes")
    folder = job.job.folder
    folder.lock.write_text("7 the-old-machine\n")
    folder.plan.write_text(folder.plan.read_text().replace(f'"{os.uname().nodename}"', '"the-old-machine"'))


def _age(state: Path) -> None:
    """Make a status 100 s older, as another machine would have written it: its age goes by the clock of the day."""
    written = json.loads(state.read_text())
    then = status_file.iso(status_file.parse_iso(written["written_at"]) - 100)
    state.write_text(json.dumps({**written, "boot": "another", "written_at": then}))


def _status_text(desk: Desk) -> str:
    argv = [sys.executable, "-m", "orchestrator.cli", "status"]
    return subprocess.run(argv, env=desk.environ, capture_output=True, text=True, timeout=RUN_S_MAX, check=True).stdout
