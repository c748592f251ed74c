"""How does a job end when it is told to? Scripts get their grace to save, and whoever stays is killed, in any phase."""

from __future__ import annotations

import json
import shutil
import signal
import time

import pytest

from orchestrator.core.errors import UserError
from orchestrator.core.jobdir import requests
from tests.support.local import FAKE_TORCH, STEPPER, Desk, kill, wait_until

SAVER = """
import os, signal, sys, time
from pathlib import Path

folder, rank = Path(os.environ["ORCH_CHECKPOINT_DIR"]), os.environ["RANK"]


def save(signum, frame):
    time.sleep(0.5)  # a wrapping shell is long gone by now
    (folder / f"rank-{rank}.json").write_text("saved")
    sys.exit(0)


signal.signal(signal.SIGTERM, save if rank != "1" else signal.SIG_IGN)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    "entry", [{"entrypoint": "train.py"}, {"command": "python3 train.py; true"}], ids=["script", "command"]
)
def test_cancel_lets_script_save_and_kills_after_grace(desk: Desk, entry: dict[str, str]) -> None:
    """On cancel a script saves, and one that ignores TERM is killed after the grace period."""
    spec: dict[str, object] = {**entry, "procs_per_node": 3, "monitor": {"stop_grace": 2}}
    job = desk.submit({"train.py": SAVER}, **spec)  # type: ignore[arg-type]
    for rank in range(3):
        job.wait_for_line("ready", rank)
    began_s = time.monotonic()
    job.job.cancel()
    status = job.wait()
    assert time.monotonic() - began_s >= 2.0
    assert (status["state"], status["reason"]) == ("CANCELLED", "cancelled by the user")
    saved = sorted(path.name for path in job.job.folder.checkpoints.glob("*.json"))
    assert saved == ["rank-0.json", "rank-2.json"]
    if "entrypoint" in entry:
        assert [rank["exit"] for rank in status["ranks"]] == [0, -9, 0]
    with pytest.raises(UserError, match="has ended already"):
        job.job.cancel()


def test_restart_resumes_from_newest_checkpoint_at_no_cost(
    desk: Desk,
) -> None:
    """orch restart ends the attempt; the next resumes from the newest checkpoint and costs no restart."""
    script = f"""{STEPPER}
folder, resume = Path(os.environ["ORCH_CHECKPOINT_DIR"]), os.environ["ORCH_RESUME_FROM"]
start = int(Path(resume).stem.partition("-")[2]) if resume else 0
run(20, start=start)
if rank == 0:
    (folder / "step-20.bin").write_bytes(b"x" * 1000)
if attempt == 1:
    run(100_000, 0.05, start=20)
"""
    job = desk.submit({**FAKE_TORCH, "train.py": script}, entrypoint="train.py", procs_per_node=2, restart={"max": 0})
    wait_until(lambda: job.seen()["checkpoint"], "a checkpoint")
    assert job.job.restart()["attempt"] == 1
    status = job.wait()
    assert (status["state"], status["attempt"]) == ("SUCCEEDED", 2)
    first, second = job.job.why()["attempts"]
    assert (first["verdict"], first["ended_why"]) == (None, "a restart requested by the user")
    assert second["resumed_from"].endswith("step-20.bin") and second["why"].startswith(first["ended_why"])
    with pytest.raises(UserError, match="the job has ended: SUCCEEDED"):
        job.job.restart()


@pytest.mark.parametrize("at_step", ["lambda step: None", "lambda step: Path(__file__).stat()"], ids=["runs", "fails"])
def test_job_with_deleted_folder_ends_for_good(desk: Desk, at_step: str) -> None:
    """A job whose folder is deleted ends and does not come back."""
    script = STEPPER + f"run(100000, at_step={at_step})"
    job = desk.submit({"train.py": script, **FAKE_TORCH}, nodes=2, entrypoint="train.py")
    job.wait_for_step(3)
    for _ in range(100):  # its processes write into it meanwhile: a person deletes again what is left
        shutil.rmtree(job.root, ignore_errors=True)
    wait_until(lambda: not job.processes(), "the end of all its processes")
    assert not job.root.exists()


def test_cancel_right_after_submit_leaves_no_rank(desk: Desk) -> None:
    """A cancel right after submit starts no rank, or ends it."""
    job = desk.submit({"train.py": "import time; time.sleep(600)"}, nodes=2, entrypoint="train.py")
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"


def test_cancel_ends_setup_lines_with_all_children(desk: Desk) -> None:
    job = desk.submit(
        {"train.py": "print('never')"},
        entrypoint="train.py",
        setup=["(setsid sleep 3600 &) ; sleep 3600 | cat"],
    )
    wait_until(lambda: sum(b"sleep" in word for word in job.commands()) >= 2, "the setup lines' children")
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
    wait_until(lambda: not job.processes(), "the end of the setup lines' children")
    assert "never" not in job.log()


def test_cancel_during_restart_delay_ends_the_job(desk: Desk) -> None:
    job = desk.submit(
        {"train.py": "import os; os._exit(int(os.environ['ORCH_ATTEMPT']))"},
        entrypoint="train.py", restart={"max": 5, "backoff": 600, "backoff_max": 600},
    )  # fmt: skip
    wait_until(lambda: len(job.attempts()) == 2 and job.verdicts()[1], "the second verdict")
    job.wait_for_state("RESTARTING")
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
    assert len(job.attempts()) == 2


def test_two_concurrent_cancels_are_one(desk: Desk) -> None:
    """Two cancels at once count as one."""
    job = desk.submit({"train.py": "import time; time.sleep(600)"}, entrypoint="train.py")
    job.wait_for_state("RUNNING")
    folder = job.job.folder.requests
    assert [requests.send(folder, "cancel"), requests.send(folder, "cancel")] == [1, 2]
    (folder / "000003.json").write_text("no request")
    assert job.wait()["state"] == "CANCELLED"


def test_external_signal_is_a_crash_and_job_resumes(desk: Desk) -> None:
    script = STEPPER + "print('ready', flush=True)\nrun(1000000 if attempt == 1 else 5)"
    job = desk.submit({**FAKE_TORCH, "train.py": script}, entrypoint="train.py")
    wait_until(lambda: len(job.steps_logged(1)) >= 3, "three steps of rank 1")
    kill(job.rank_procs()[1], signal.SIGTERM)
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == ["crash", None]
    assert job.verdict()["ranks"] == [1]
    assert "SIGTERM" in json.dumps(job.verdict())


def test_time_limit_ends_job_after_its_grace(desk: Desk) -> None:
    job = desk.submit({"train.py": SAVER}, procs_per_node=1, entrypoint="train.py", time_limit="8s")
    assert job.wait()["state"] == "FAILED"
    assert job.kinds() == ["time_limit"]
    assert [path.name for path in job.job.folder.checkpoints.iterdir()] == ["rank-0.json"]
