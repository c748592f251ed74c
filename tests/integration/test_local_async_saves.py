"""A sharded training with `checkpoint.async: dcp` on a slow disk, of which a rank is killed while a checkpoint is being written."""

from __future__ import annotations

import json
import re
import statistics

from tests.support.local import Desk, Sight
from tests.support.sharded import SHARDED

WRITE_S = 0.8
STEPS, EVERY, DIES_AT = 100, 30, 62

SCRIPT = f"""{SHARDED}
class SlowDisk(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        written = super().write_data(plan, planner)
        time.sleep({WRITE_S})
        return written


for number in range(first + 1, {STEPS} + 1):
    step()
    if number % {EVERY} == 0:
        dcp.save(state(number), storage_writer=SlowDisk(folder / f"step-{{number}}"))
    if (number, rank, attempt) == ({DIES_AT}, 1, 1) and sys.argv[1] != "lives":
        while not list((folder / "step-60").glob("__1_*.distcp")):
            time.sleep(0.01)
        assert not (folder / "step-60" / ".metadata").exists()
        if sys.argv[1] == "raises":
            raise RuntimeError("no more data")
        os.kill(os.getpid(), signal.SIGKILL)
print(f"ends with {{digest()}}", flush=True)
"""


def _run(desk: Desk, word: str, checkpoint: dict[str, str]) -> Sight:
    job = desk.submit({"train.py": SCRIPT}, entrypoint=f"train.py {word}", checkpoint=checkpoint)
    assert job.wait(240.0)["state"] == "SUCCEEDED", job.job.why()
    return job


def _digests(job: Sight, attempt: int) -> list[str]:
    return [re.findall(r"ends with (\w+)", job.log(rank, attempt))[0] for rank in (0, 1)]


def _stalls_s(job: Sight) -> dict[int, float]:
    """Return for how long ranks made no steps at each checkpoint, by its step."""
    whole: dict[int, dict[str, object]] = {}
    for line in (job.job.folder.checkpoints / "ledger.jsonl").read_text().splitlines():
        entry = json.loads(line)
        whole.setdefault(entry["number"], {}).update(entry)
    return {int(str(one["steps"])): float(str(one["stall_s"])) for one in whole.values() if one.get("stall_s")}


def test_killed_rank_begins_from_last_whole_checkpoint_and_training_hardly_waits(desk: Desk) -> None:
    calm = _run(desk, "lives", {})
    job = _run(desk, "dies", {"async": "dcp"})
    assert f"begins at {EVERY} with" in job.log(0, 2), job.job.why()
    assert _digests(job, 2) == _digests(calm, 1)
    at_once, waited = _stalls_s(job), _stalls_s(calm)
    print("stalls with and without:", at_once, waited)
    assert {30, 60} <= at_once.keys()
    assert statistics.median(waited.values()) > WRITE_S > 2 * statistics.median(at_once.values())


def test_rank_that_raises_first_waits_until_its_checkpoint_is_written(desk: Desk) -> None:
    job = _run(desk, "raises", {"async": "dcp"})
    assert "no more data" in job.verdict()["summary"]
    assert "begins at 60 with" in job.log(0, 2), job.job.why()
