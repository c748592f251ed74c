"""What follows when a rank dies? The culprit is named, the gang restarts from the newest checkpoint, or the job ends."""

from __future__ import annotations

import re
import time

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.client import job_checkpoints
from orchestrator.core.wire import reports
from tests.support.local import FAKE_TORCH, STEPPER, Desk, kill
from tests.support.torch_script import WITHOUT_DYNAMO

STEPS = 40
EVERY = 10

TRAINS = f"""
{WITHOUT_DYNAMO}
import hashlib, os, signal, sys, time
from pathlib import Path
from torch import distributed as dist, nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

STEPS, EVERY = {STEPS}, {EVERY}


if os.environ["ORCH_ATTEMPT"] == "1":
    class Lost: pass  # the next attempt cannot load what holds it


def main():
    dist.init_process_group("gloo")
    print("final", trained(os.environ["ORCH_RESUME_FROM"]), flush=True)
    hooks.clear()  # orch counts no more steps
    print("undisturbed", trained("", saves=False), flush=True)
    dist.destroy_process_group()


def trained(path, saves=True):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    done = 0
    if path:
        saved = torch.load(path)
        done = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        print(f"resumed at step {{done}}", flush=True)
    for step in range(done + 1, STEPS + 1):
        generator = torch.Generator().manual_seed(step * 100 + rank)
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        if (rank, step, os.environ["ORCH_ATTEMPT"]) == (1, 34, "1"):
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        if saves and rank == 0 and step % EVERY == 0:
            time.sleep(0.02)  # the kernel's clock for files may be as late as that
            path = Path(os.environ["ORCH_CHECKPOINT_DIR"]) / f"step-{{step:03d}}.pt"
            state = {{"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
            if step == 30 and "Lost" in globals():
                torch.save({{**state, "lost": Lost()}}, path.with_name("step-031.pt"))
        time.sleep(0.025)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    main()
"""


def test_killed_rank_resumes_to_bitwise_identical_weights(
    desk: Desk,
) -> None:
    """The newest save cannot be loaded: it is given up after one attempt for the one before it."""
    # Rank 1 dies in step 34, before the gradients meet: four checkpoints are there, and each rank has made 33 steps.
    job = desk.submit({"train.py": TRAINS}, entrypoint="train.py")
    status = job.wait()
    assert status["state"] == "SUCCEEDED", status["reason"]
    ends = [line.split() for rank in (0, 1) for line in job.log(rank, 3).splitlines()[-2:]]
    assert [name for name, _ in ends] == ["final", "undisturbed"] * 2
    assert len({weights for _, weights in ends}) == 1

    first, second, third = job.attempts()
    verdict = first["verdict"]
    assert (verdict["kind"], verdict["ranks"], verdict["node"]) == ("crash", [1], "node-0")
    assert "SIGKILL (9)" in verdict["summary"]
    assert second["resumed_from"].endswith("step-031.pt")
    assert third["resumed_from"].endswith("step-030.pt")
    (passed,) = third["passed"]
    assert re.match("distrusted: rank [01] could not load it in attempt 2", passed["why"])
    states = {
        one["main"]: one["state"]
        for one in job_checkpoints.list_checkpoints(job.job.folder, job.job.plan(), verify=False)
    }
    assert states["step-031.pt"] == "distrusted"
    assert "resumed at step 30" in job.log(0, 3)
    assert (first["last_step"], third["first_step"]) == (33, 31)
    assert first["repeated_steps"] == 3, "the second attempt made none"
    assert status["restarts"] == 2
    assert status["step"] == STEPS


CRASHER = (
    STEPPER
    + """
def crash(step):
    if step == 7 and rank == 2:
        raise ValueError("the batch is empty")


run(1000, at_step=crash)
"""
)


def test_repeated_exception_at_same_step_ends_the_job(desk: Desk) -> None:
    job = desk.submit({**FAKE_TORCH, "train.py": CRASHER}, nodes=2, entrypoint="train.py")
    status = job.wait()
    assert (status["state"], job.kinds()) == ("FAILED", ["crash", "no_progress"])
    verdict = job.verdict()
    assert verdict["ranks"] == [2]
    assert verdict["node"] == "node-1"
    assert verdict["step"] == 6
    line = CRASHER.splitlines().index('        raise ValueError("the batch is empty")') + 1
    assert "ValueError: the batch is empty" in verdict["summary"]
    assert f"train.py:{line} crash" in verdict["summary"]
    assert "Traceback (most recent call last)" in verdict["evidence"][-1]
    assert "step 6" in job.verdict(2)["summary"]


def test_never_restarted_exit_code_ends_job_at_once(desk: Desk) -> None:
    script = "import os, sys, time\nsys.exit(17) if os.environ['RANK'] == '1' else time.sleep(600)\n"
    job = desk.submit({"train.py": script}, entrypoint="train.py", restart={"never_on_exit_codes": [17]})
    assert job.wait()["state"] == "FAILED"
    assert job.kinds() == ["crash"]
    assert "exited with code 17" in job.verdict()["summary"]


@pytest.mark.parametrize(
    ("script", "says"),
    [("exec('print(')\n", "SyntaxError"), ("import no_such_module\n", "No module named 'no_such_module'")],
    ids=["syntax", "import"],
)
def test_unfixable_failure_ends_after_one_attempt(desk: Desk, script: str, says: str) -> None:
    """A failure that no restart can fix ends the job after one attempt."""
    job = desk.submit({"train.py": script}, entrypoint="train.py")
    assert job.wait()["state"] == "FAILED"
    assert job.kinds() == ["crash"]
    assert says in job.verdict()["summary"]
    assert "train.py" in job.verdict()["evidence"][-1]


def test_exit_code_without_traceback_blames_no_caught_exception(desk: Desk) -> None:
    script = """
import sys, traceback
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
sys.exit(3)
"""
    job = desk.submit({"train.py": script}, procs_per_node=1, entrypoint="train.py", restart={"max": 0})
    status = job.wait()
    assert (status["state"], len(job.attempts())) == ("FAILED", 1)
    assert "exited with code 3" in job.verdict()["summary"]
    assert "ZeroDivisionError" not in str(job.verdict())
    assert "restart.max is 0" in status["reason"]


def test_refused_arguments_are_reported_with_last_log_line(desk: Desk) -> None:
    script = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    entry = "train.py --stepz 4"
    job = desk.submit({"train.py": script}, procs_per_node=1, entrypoint=entry, restart={"max": 0})
    assert job.wait()["state"] == "FAILED"
    said = "train.py: error: unrecognized arguments: --stepz 4"
    assert job.verdict()["evidence"][-1] == f"its log ends with: {said}"


def test_killed_rank_is_not_blamed_on_caught_exception(desk: Desk) -> None:
    script = """
import multiprocessing, time, traceback


def fail():
    raise KeyError("in a worker")


if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=fail)
    worker.start()
    worker.join()
    print("worker gone", flush=True)
    time.sleep(600)
"""
    job = desk.submit({"train.py": script}, procs_per_node=1, entrypoint="train.py", restart={"max": 0})
    job.wait_for_line("worker gone")
    kill(job.rank_procs()[0])
    assert job.wait()["state"] == "FAILED"
    assert "SIGKILL" in job.verdict()["summary"]
    assert "KeyError" not in str(job.verdict())


def test_crash_victims_are_stopped_and_recorded(desk: Desk) -> None:
    job = desk.submit({**FAKE_TORCH, "train.py": STEPPER + "run(100000)"}, nodes=2, entrypoint="train.py",
                      restart={"max": 0})  # fmt: skip
    job.wait_for_step(5)
    kill(job.rank_procs()[1])
    assert job.wait()["state"] == "FAILED"
    exits = {one.rank: one for one in job.news(reports.Exited)}
    assert (exits[1].signal, exits[1].ordered) == (9, False)
    assert all(exits[rank].ordered and exits[rank].signal == 15 for rank in (0, 2, 3))
    assert len(job.news(d.Judge)) == 1


def test_briefly_missing_job_folder_is_waited_for(desk: Desk) -> None:
    script = STEPPER + "run(10_000 if attempt == 1 else 20, each_s=0.05)\n"
    job = desk.submit({**FAKE_TORCH, "train.py": script}, procs_per_node=1, entrypoint="train.py", restart={"max": 1})
    job.wait_for_step(5)
    rank = job.rank_procs()[0]
    root = job.job.folder.root
    away = root.with_name("away")
    root.rename(away)
    try:
        kill(rank)
        time.sleep(2.0)
    finally:
        away.rename(root)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert job.job.status()["attempt"] == 2
