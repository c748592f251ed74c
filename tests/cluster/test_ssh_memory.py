"""Do checkpoints in memory outlive their host, over real sshd and without a shared disk?

Nothing arrives at home: a file stands where checkpoints from hosts are gathered. What the next attempt begins from is in the memory of
hosts that are left, or on their disks.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from typing import Any

import pytest

from orchestrator.core.checkpoints import ledger, memory
from orchestrator.core.checkpoints.checkpoint import CheckpointState, FileLocation
from orchestrator.supervisor.transfers.checkpoint_copies import INCOMING
from tests.support.cluster.box import Box
from tests.support.cluster.desk import FAKE_TORCH, TOGETHER, Desk, Job

EVERY = 20

STATES = (
    TOGETHER
    + f"""
import hashlib

checkpoints = Path(os.environ["ORCH_CHECKPOINT_DIR"])
resume_from = os.environ.get("ORCH_RESUME_FROM", "")
start, state = 0, b"%d" % rank
if resume_from:
    data = (Path(resume_from) / f"rank{{rank}}.pt").read_bytes()
    state, counted = data[:32], data[32:64]
    assert data[64:] == state * (len(data) // 32 - 2), "torn"
    start = int(counted)
steps = int(os.environ["STEPS"])


def at_step(step):
    global state
    if step > 1 and step % {EVERY} == 1:
        folder = checkpoints / f"step-{{step - 1}}"
        folder.mkdir(exist_ok=True)
        data = state + b"%032d" % (step - 1) + state * int(os.environ["BLOCKS"])
        part = folder / f".rank{{rank}}.pt.part"
        part.write_bytes(data)
        part.rename(folder / f"rank{{rank}}.pt")
    together(True)
    state = hashlib.sha256(state + b"%d" % step).digest()
    optimizer.step()
    time.sleep(0.03)


meet()
run(steps, at_step=at_step, start=start)
print("weights", state.hex(), flush=True)
"""
)
"""A state of each rank that depends on all of its steps; every rank saves its own, of 32 bytes times `BLOCKS`."""


def expected(rank: int, steps: int) -> str:
    """Return the weights of a rank that nothing has disturbed."""
    state = b"%d" % rank
    for step in range(1, steps + 1):
        state = hashlib.sha256(state + b"%d" % step).digest()
    return state.hex()


def submit(desk: Desk, steps: int, **spec: Any) -> Job:
    """Submit the job; nothing of its checkpoints will arrive at home."""
    fields: dict[str, Any] = {
        "checkpoint": {"memory": "512M", "keep": 3},
        "env": {"STEPS": str(steps), "BLOCKS": str(1 << 16)},
        "monitor": {"heartbeat_s": 0.2, "node_timeout": 5},
        **spec,
    }
    job = desk.submit({**FAKE_TORCH, "train.py": STATES}, **fields)
    (job.folder.checkpoints / INCOMING).write_text("nothing arrives")
    return job


def safe_step(job: Job) -> int:
    """Return the step of the newest checkpoint that outlives any host, as the ledger has it; 0 for none."""
    saves, _ = ledger.read(job.folder.root, job.folder.ledger)
    steps = [one.step or 0 for one in saves.values() if one.state is CheckpointState.WHOLE and memory.is_safe(one)]
    return max(steps, default=0)


def steps_at_home(job: Job) -> list[int]:
    """Return the steps of the complete checkpoints, all of which are at home; none before that."""
    saves, _ = ledger.read(job.folder.root, job.folder.ledger)
    whole = [one for one in saves.values() if one.state is CheckpointState.WHOLE]
    home = FileLocation("", str(job.folder.checkpoints))
    return sorted(one.step or 0 for one in whole) if all(one.locations[0] == home for one in whole) else []


def resumed_step(job: Job, attempt: int) -> int:
    """Return the step from which an attempt has begun."""
    story = next(one for one in job.why() if one["attempt"] == attempt)
    return int(story["resumed_from"].rpartition("step-")[2]) if story["resumed_from"] else 0


def assert_weights(job: Job, steps: int, ranks: int) -> None:
    last = job.seen()["attempt"]
    for rank in range(ranks):
        assert f"weights {expected(rank, steps)}" in job.log(rank, last)


def memory_left(box: Box) -> list[str]:
    """Return what is left of jobs in the memory of hosts that are on."""
    found = []
    for host in box.nodes:
        if host.is_up:
            found += [f"{host.name}: {line}" for line in host.run(["ls", "/dev/shm"]).stdout.split() if "orch-" in line]
    return found


def test_power_cut_costs_nothing_that_is_at_a_neighbour(desk: Desk, box: Box) -> None:
    """The next attempt begins from a checkpoint that only hosts have, one of which is lost for good."""
    job = submit(desk, 1_200, nodes=3, ssh={"hosts": "node[1-4]"}, spares=1)
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
    step = safe_step(job)
    box.power_off("node2")
    job.until(lambda seen: seen["attempt"] == 2 and seen["state"] == "RUNNING", "the second attempt")
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.placed() == ["node1", "node4", "node3"] or sorted(job.placed()) == ["node1", "node3", "node4"]
    assert resumed_step(job, 2) >= step > 0
    assert_weights(job, 1_200, 6)
    job.wait_until(lambda: not memory_left(box), "memory without anything of the job")


@pytest.mark.soak
def test_twenty_power_cuts_at_random_moments(desk: Desk, box: Box) -> None:
    """Hosts lose their power while checkpoints are written, hashed, copied and stored; no attempt begins from less than was safe."""
    seed = random.SystemRandom().randrange(1 << 32)
    moments, cuts, steps = random.Random(seed), 20, 20_000
    print("seed", seed)
    job = submit(desk, steps, nodes=3, ssh={"hosts": "node[1-4]"}, spares=1, restart={"max": 3 * cuts})
    log = []
    for cut in range(1, cuts + 1):
        attempt = job.seen()["attempt"]
        before = safe_step(job)
        job.wait_until(lambda before=before: safe_step(job) > before, "another checkpoint that is safe")
        time.sleep(moments.uniform(0.0, 2.0))
        victim = moments.choice([name for name in job.placed() if name != "node1"])
        step = safe_step(job)
        box.power_off(victim)
        job.until(
            lambda seen, last=attempt: (
                seen["attempt"] > last and seen["state"] == "RUNNING" and seen["ranks"][0]["pid"]
            ),
            f"the attempt after cut {cut}",
        )
        now = job.seen()["attempt"]
        log.append({"cut": cut, "victim": victim, "safe": step, "attempt": now, "resumed": resumed_step(job, now)})
        print(json.dumps(log[-1]), file=sys.stderr, flush=True)
        assert log[-1]["resumed"] >= step, log
        box.power_on(victim)
    (job.folder.root / "enough").touch()
    desk.orch("cancel", job.id)


def test_checkpoints_are_on_disk_after_the_end_and_resumed_from_there(desk: Desk, box: Box) -> None:
    """A job that was cancelled has nothing in memory, and goes on from its hosts' disks."""
    job = submit(desk, 400, nodes=2, ssh={"hosts": "node[1-2]"})
    (job.folder.checkpoints / INCOMING).unlink()
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"
    job.wait_until(lambda: not memory_left(box), "memory without anything of the job")
    job.wait_until(lambda: safe_step(job), "a checkpoint at home")
    step = safe_step(job)
    desk.orch("resume", job.id)
    assert job.wait()["state"] == "SUCCEEDED"
    assert resumed_step(job, 2) >= step > 0
    assert_weights(job, 400, 4)
    job.wait_until(lambda: steps_at_home(job) == [340, 360, 380], "the checkpoints that are kept, at home")
