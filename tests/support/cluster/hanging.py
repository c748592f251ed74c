"""What hangs do the tests on hosts have, and what must be known of one at home? For the clusters in a box.

Two ranks on two hosts train over gloo until rank 1 reads a FIFO that nobody writes; rank 0 waits in an all_reduce.
"""

from __future__ import annotations

import json
from typing import Any

from tests.hangs.script import lines_at_fault, training

from .desk import Desk, Job

ONCE = """
import os, sys
if os.environ["ORCH_ATTEMPT"] != "1":
    sys.exit()
"""
"""The beginning of a script whose next attempt has nothing to do, and loads no torch for it."""

READS_A_FIFO = ONCE + training("""
def load_batch(path):
    os.mkfifo(path)
    print("reads", path, flush=True)
    with open(path, "rb", buffering=0) as file:  # here
        return file.read()


def misbehave():
    if rank == 1:
        load_batch("shard-17.bin")
""")
LINE = lines_at_fault(READS_A_FIFO)[0]

HANG_TIMEOUT_S = 17.0
"""Long enough for `orch stacks` to be quicker."""

FOUND_S_MAX = HANG_TIMEOUT_S + 20.0
"""With what a busy machine adds."""


def reading_a_fifo(desk: Desk, **spec: Any) -> Job:
    """Submit the training, and return it once rank 1 is at its FIFO."""
    monitor = {"heartbeat_s": 1.0, "hang_timeout": HANG_TIMEOUT_S}
    job = desk.submit({"train.py": READS_A_FIFO}, procs_per_node=1, start="fresh", monitor=monitor, **spec)
    job.wait_for_line("reads shard-17.bin", rank=1)
    return job


def assert_stacks_tell_and_change_nothing(job: Job) -> None:
    """`orch stacks` names the place of rank 1 and what the other waits in, and the same processes go on."""
    before = _processes(job)
    told = json.loads(job.desk.orch("stacks", job.id, "--json", user=job.user.name).stdout)
    assert (told["attempt"], told["unanswered"], len(told["ranks"])) == (1, [], 2), told
    waits, culprit = told["ranks"]
    assert "shard-17.bin" in culprit["why"] and LINE in culprit["where"], culprit
    assert "all_reduce" in waits["why"], waits
    seen = job.seen()
    assert (seen["state"], seen["attempt"], _processes(job)) == ("RUNNING", 1, before), job.story()


def assert_judged_and_mended(job: Job) -> None:
    """The verdict names rank 1 and its line, the pages of both hosts are at home, and the next attempt ends well."""
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert job.kinds() == ["hang", None]
    verdict = job.why()[0]["verdict"]
    assert (verdict["ranks"], verdict["node"]) == ([1], job.placed()[1]), verdict
    assert all(word in verdict["culprit"] for word in ("shard-17.bin", LINE, "load_batch")), verdict
    assert "rank 0 in all_reduce" in verdict["waiting"], verdict
    assert verdict["detected_s"] < FOUND_S_MAX, verdict
    assert_pages_are_at_home(job)


def assert_pages_are_at_home(job: Job, attempt: int = 1) -> None:
    """Every rank has its stacks and what torch has told, whichever host it was on."""
    pages = {path.name: path.read_text() for path in job.folder.evidence(attempt).glob("rank-*")}
    for rank in range(2):
        name = f"rank-{rank:05d}"
        assert ("load_batch" if rank == 1 else "all_reduce") in pages[f"{name}-stacks.txt"], sorted(pages)
        lines = [json.loads(line) for line in pages[f"{name}-flight.jsonl"].splitlines()]
        entries = lines[0]["trace"]["entries"]
        assert entries[-1]["profiling_name"] == "gloo:all_reduce", lines
        assert len(lines) >= 2 and all("trace" in line or line["unchanged"] for line in lines), lines


def _processes(job: Job) -> list[int]:
    return [int(rank["pid"]) for rank in job.seen()["ranks"]]
