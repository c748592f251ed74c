"""A training in shards on two nodes that overwrites one folder in place, and a save of it that is cut off in the middle."""

from __future__ import annotations

import re
from typing import Any

from tests.support.sharded import SHARDED

from .desk import Job

SCRIPT = (
    SHARDED
    + """
class Writer(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        is_torn = number == 30 and attempt == 1 and os.environ.get("TORN")
        if is_torn and rank == 0:
            time.sleep(600)
        written = super().write_data(plan, planner)
        if is_torn:
            written.wait()
            print("has written its piece of step 30", flush=True)
        return written


for number in range(first + 1, 41):
    while number == 30 and attempt == 1 and os.environ.get("TORN") and not (folder.parent / "gate").exists():
        time.sleep(0.05)
    step()
    if number % 10 == 0:
        dcp.save(state(number), storage_writer=Writer(folder / "latest"))
print(f"ends with {digest()}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
)
"""With `TORN`, ranks wait for a gate before step 30 of the first attempt; then rank 1 writes its piece of it, and rank 0
does not."""

FIELDS: dict[str, Any] = {"entrypoint": "train.py", "nodes": 2, "procs_per_node": 1}
CALM, TORN = {"PACE_S": "0.3"}, {"PACE_S": "0.3", "TORN": "yes"}
RANKS = (0, 1)


def digests(job: Job, attempt: int = 1) -> list[str]:
    """Return the weights that each rank ended with."""
    found = [re.search(r"ends with (\w+)", job.log(rank, attempt)) for rank in RANKS]
    assert all(found), job.story()
    return [match[1] for match in found if match]


def wait_until_torn(job: Job) -> None:
    """Wait until the save of step 20 is whole, and rank 1 alone has then written its piece of step 30."""
    job.until(lambda seen: (seen.get("checkpoint") or {"step": 0})["step"] == 20, "step 20")
    for name in job.placed():
        (job.on_host(name).root / "gate").touch()
    job.wait_for_line("has written its piece of step 30", 1)


def assert_went_on_from_20(job: Job, wanted: list[str]) -> None:
    """The second attempt began at step 20 on both nodes, and ended with these weights."""
    status = job.wait()
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 1), job.story()
    for rank in RANKS:
        assert f"attempt 2 rank {rank} begins at 20 with" in job.log(rank, 2)
    assert digests(job, 2) == wanted
