"""What do the tests of real training train? `jobs/tiny_gpt.py`, with torch and gloo, so that each step can be counted.

Weights are compared bit for bit: the script prints the sha256 of what it has learnt. Every rank logs every step, so
that a line that is lost or doubled is seen. Nothing waits for a training that is too quick for its test: it may be
given a gate, a step before its end at which all ranks wait until the test lets them through.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .desk import Desk, Job
from .verbs import REPOSITORY

EVERY = 10
"""Steps from checkpoint to checkpoint."""

GATE_BEFORE_END = 5
"""So many steps are left to do behind the gate."""

GPT = (REPOSITORY / "jobs/tiny_gpt.py").read_text()
TRAIN = """
import os
import sys
import time
from pathlib import Path

import tiny_gpt
from torch.optim.optimizer import register_optimizer_step_post_hook

tiny_gpt.LOG_EVERY_STEPS = 1
tiny_gpt.VALIDATE_EVERY_STEPS = 1000
resumed = os.environ["ORCH_RESUME_FROM"]
step = int(Path(resumed).stem[5:]) if resumed else 0
gate = int(os.environ.get("GATE", "0"))
pace_s = float(os.environ.get("PACE_S", "0"))
opened = Path(os.environ["ORCH_CHECKPOINT_DIR"]) / "gate-is-open"


def say(optimizer, *_):
    global step
    step += 1
    os.write(1, f"rank {os.environ['RANK']} made step {step}\\n".encode())
    time.sleep(pace_s)
    if step == gate:
        deadline_s = time.monotonic() + 400
        while not opened.exists():
            if time.monotonic() > deadline_s:
                sys.exit("nobody has opened the gate")
            time.sleep(0.05)


register_optimizer_step_post_hook(say)
tiny_gpt.main()
"""
FILES = {"train.py": TRAIN, "tiny_gpt.py": GPT}


def train(
    desk: Desk, steps: int, files: Mapping[str, str] = FILES, *, gate: bool = False, pace_s: float = 0.0, **spec: Any
) -> Job:
    """Submit the training with two ranks on each host, unless `spec` says otherwise; a step takes `pace_s` more."""
    env = {"PACE_S": str(pace_s), **({"GATE": str(steps - GATE_BEFORE_END)} if gate else {}), **spec.pop("env", {})}
    entry = f"train.py --steps {steps} --checkpoint-every {EVERY} --width 32 --layers 1"
    checkpoint = {"path": "step-*.pt", "keep": 3, **spec.pop("checkpoint", {})}
    return desk.submit(files, entrypoint=entry, checkpoint=checkpoint, env=env, **spec)


def open_gate(job: Job) -> None:
    """Let the ranks of a job with a gate come to their end, in this attempt and in all that follow."""
    (job.folder.checkpoints / "gate-is-open").touch()


def digest(job: Job) -> str:
    """Return the sha256 of the weights that a job ended with."""
    attempt = job.status()["attempt"]
    found = re.search(r"final weights sha256 (\w{64})", job.log(0, attempt))
    assert found, job.story()
    return found.group(1)


def steps_made(job: Job, rank: int, attempt: int = 1) -> list[int]:
    """Return the steps that a rank logged in an attempt, in the order of the log."""
    made = re.findall(r"^rank (\d+) made step (\d+)$", job.log(rank, attempt), re.MULTILINE)
    assert all(name == str(rank) for name, _ in made), f"the log of rank {rank} has lines of others"
    return [int(step) for _, step in made]


def assert_logged_once(job: Job, ranks: int, steps: int) -> None:
    """Every rank's log has every step of the only attempt once, in order."""
    for rank in range(ranks):
        assert steps_made(job, rank) == list(range(1, steps + 1))
    losses = re.findall(r"^step (\d+) loss", job.log(0), re.MULTILINE)
    assert losses == [str(step) for step in range(1, steps + 1)]


def assert_resumed(job: Job, ranks: int, steps: int) -> None:
    """The last attempt began from a checkpoint of an earlier one, and each rank's log goes on from there to the end."""
    *before, last = [one["attempt"] for one in job.why() if steps_made(job, 0, one["attempt"])]
    first = steps_made(job, 0, last)[0]
    assert job.why()[-1]["resumed_from"] is not None
    assert first > 1 and (first - 1) % EVERY == 0 and first - 1 <= steps_made(job, 0, before[-1])[-1]
    for rank in range(ranks):
        assert steps_made(job, rank, last) == list(range(first, steps + 1))
