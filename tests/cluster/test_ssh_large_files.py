"""Does bulk come home whole, without slowing the ranks or filling memory? Logs and checkpoints, by size.

`conftest.HOSTS` hosts are more than enough; what is measured here is only that limits hold, not how fast it goes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from orchestrator.core.checkpoints import ledger
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.host import procfs
from tests.support.cluster.box import Box
from tests.support.cluster.desk import ENDED, FAKE_TORCH, STEPPER, TOGETHER, Desk

LOG_MIB = 1024
CHECKPOINT_MIB = 500
BULK_S_MAX = 400.0
SLOW_MIB, SLOW_MBIT_PER_S = 40, 16
RSS_BYTES_MAX = 200 << 20

TALKER = """
import os

line = b"x" * 98 + b"\\n"
block = (line * (1 << 20))[: (1 << 20) - 17]


def talk(mib):
    for number in range(mib):
        data = b"%016d\\n" % number + block
        while data:
            data = data[os.write(1, data):]
"""

SAVER = (
    TOGETHER
    + """
import hashlib

checkpoints = Path(os.environ["ORCH_CHECKPOINT_DIR"])
resume_from = os.environ.get("ORCH_RESUME_FROM", "")
if resume_from:
    data = Path(resume_from).read_bytes()
    print("resumed", len(data), hashlib.sha256(data).hexdigest(), flush=True)
    run(30, start=20)
    raise SystemExit(0)


def save(step):
    if rank == 0 and step == 21:
        part = checkpoints / ".part"
        part.write_bytes(os.urandom(MIB << 20))
        part.replace(checkpoints / "step-20")
    together(True)


meet()
run(10**9, each_s=0.05, at_step=save)
""".replace("MIB", str(CHECKPOINT_MIB))
)


def _expected_digest(mib: int) -> str:
    line = b"x" * 98 + b"\n"
    block = (line * (1 << 20))[: (1 << 20) - 17]
    digest = hashlib.sha256()
    for number in range(mib):
        digest.update(b"%016d\n" % number + block)
    return digest.hexdigest()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@pytest.mark.soak
def test_gigabyte_log_is_fetched_exactly_in_bounded_memory(desk: Desk, box: Box) -> None:
    """A log of one gigabyte is fetched byte for byte with bounded memory."""
    files = {**FAKE_TORCH, "talk.py": TALKER, "train.py": f"import talk\ntalk.talk({LOG_MIB})\n"}
    job = desk.submit(files, nodes=1, procs_per_node=1)
    supervisor = job.supervisor()
    rss_bytes = [0]

    def is_over() -> bool:
        stat = procfs.stat(supervisor.pid)
        rss_bytes.append(stat.rss_bytes if stat else 0)
        return str(job.seen()["state"]) in ENDED

    job.wait_until(is_over, "the end of the job", BULK_S_MAX)
    assert job.status()["state"] == "SUCCEEDED"
    job.wait_until(job.folder.ended.exists, "the log at home", BULK_S_MAX)
    desk.orch("collect", job.id)
    assert _digest(job.folder.rank_log(1, 0)) == _expected_digest(LOG_MIB)
    assert max(rss_bytes) < RSS_BYTES_MAX


@pytest.mark.soak
def test_large_checkpoint_is_fetched_and_sent_on(desk: Desk, box: Box) -> None:
    """A checkpoint of half a gigabyte is fetched and then sent to another host."""
    job = desk.submit(
        {**FAKE_TORCH, "train.py": SAVER}, spares=1, ssh={"hosts": "node[1-3]"}, checkpoint={"path": "step-*"}
    )
    job.until(lambda seen: seen["checkpoint"] is not None, "the checkpoint at home", BULK_S_MAX)
    (home,) = job.folder.checkpoints.glob("step-20")
    digest = _digest(home)
    assert digest == _digest(job.on_host("node1").checkpoints / "step-20")
    box.power_off("node1")
    status = job.wait(BULK_S_MAX)
    assert (status["state"], job.kinds()) == ("SUCCEEDED", ["node_lost", None])
    assert f"resumed {CHECKPOINT_MIB << 20} {digest}" in job.log(0, 2)
    assert "node1" not in job.placed()


SAVES_MUCH = (
    TOGETHER
    + """
checkpoints = Path(os.environ["ORCH_CHECKPOINT_DIR"])
resume_from = os.environ.get("ORCH_RESUME_FROM", "")
start = int(Path(resume_from).name.partition("-")[2]) if resume_from else 0
print("begins at", start, flush=True)


def save(step):
    if rank == 0 and step in (11, 21) and step > start + 1:
        part = checkpoints / ".part"
        part.write_bytes(os.urandom(MIB << 20 if step == 21 and attempt == 1 else 1000))
        part.replace(checkpoints / f"step-{step - 1}")
    together(True)


meet()
run(40 if start else 10**9, each_s=0.05 if start else 0.2, at_step=save, start=start)
""".replace("MIB", str(SLOW_MIB))
)
"""Saves step 10, and in its first attempt so much of step 20 that it is long on its way."""


def test_host_lost_during_transfer_costs_only_that_checkpoint(desk: Desk, box: Box) -> None:
    """A host lost while its checkpoint is being fetched costs that checkpoint only."""
    job = desk.submit({**FAKE_TORCH, "train.py": SAVES_MUCH}, checkpoint={"path": "step-*"}, ssh={"hosts": "node[1-3]"})
    box.slow_wire("node1", SLOW_MBIT_PER_S)
    job.until(lambda seen: [one["name"] for one in seen.get("travels", [])] == ["step-20"], "its way home")
    job.until(lambda seen: seen["travels"] and (seen["travels"][0]["done_bytes"] or 0) > 0, "some of it")
    assert job.seen()["checkpoint"]["path"].endswith("/step-10")
    box.power_off("node1")
    status = job.wait()
    assert (status["state"], job.kinds()) == ("SUCCEEDED", ["node_lost", None]), job.story()
    assert job.why()[1]["resumed_from"].endswith("/step-10")
    assert "begins at 10" in job.log(0, 2) and job.placed() == ["node2", "node3"] and job.note("node1")
    box.power_on("node1")  # what it still has of step 20 is older than what is at home by now
    saves, _ = ledger.read(job.folder.root, job.folder.ledger)
    assert [(save.main, save.attempt, save.state) for save in saves.values()] == [
        ("step-10", 1, CheckpointState.WHOLE), ("step-20", 1, CheckpointState.GONE), ("step-20", 2, CheckpointState.WHOLE),
    ]  # fmt: skip
    assert (job.folder.checkpoints / "step-20").stat().st_size == 1000
    assert not list((job.folder.checkpoints / ".coming").iterdir())
    desk.orch("clean", "--yes")  # the agent there, which nobody could dismiss, would wait for an hour


def test_shared_home_files_are_not_copied(can_have_hosts: None) -> None:
    with Box(3, shared_home=True) as box:
        desk = Desk(box)
        home = "/home/trainer/.orch"
        text = STEPPER + "run(20)\n(Path(os.environ['ORCH_CHECKPOINT_DIR']) / f'step-{rank}').write_text('x')\n"
        path = desk.write({**FAKE_TORCH, "train.py": text}, checkpoint={"path": "step-*"})
        done = desk.orch("submit", path, "--follow", env={"ORCH_HOME": home})
        assert "SUCCEEDED" in done.stdout
        (root,) = box.login.path(f"{home}/jobs").iterdir()
        assert sorted(one.name for one in (root / "checkpoints").glob("step-*")) == [f"step-{n}" for n in range(4)]
        assert len(list((root / "logs/attempt-001").glob("rank-*.log"))) == 4
        saves, _ = ledger.read(root, root / "checkpoints/ledger.jsonl")
        assert {save.state for save in saves.values()} == {CheckpointState.WHOLE} and len(saves) == 4
        assert all(place.host == "" for save in saves.values() for place in save.locations)
        assert not desk.clear_up()
