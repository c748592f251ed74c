"""Is what real torch writes told apart, whole from cut off, and gone on from? With torch.distributed.checkpoint."""

from __future__ import annotations

import re

from orchestrator.client import saves
from tests.support.local import Desk
from tests.support.sharded import SHARDED

TRAIN = (
    SHARDED
    + """
for number in range(first + 1, 41):
    step()
    if number == 10:
        dcp.save(state(number), checkpoint_id=folder / "step-10")
    if number == 20:
        saving = dcp.async_save(
            state(number), checkpoint_id=folder / "step-20", process_group=in_background
        )
        print(f"rank {rank} saved 20 with {digest()}", flush=True)
    if number == 25 and not resume:
        saving.result()
    if number == 30 and attempt == 1:  # what a kill in the middle of a save leaves
        dcp.save(state(number), checkpoint_id=folder / "step-30")
        dist.barrier()
        (folder / "step-30" / ".metadata").unlink(missing_ok=True)
    if number == 35 and attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    dcp.save({"step": number}, checkpoint_id=folder / "step-40", no_dist=True)
dist.barrier()
dist.destroy_process_group()
"""
)


def test_a_job_goes_on_from_the_newest_whole_folder_of_torch_distributed_checkpoint(desk: Desk) -> None:
    job = desk.submit({"train.py": TRAIN}, entrypoint="train.py")
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert job.attempts()[1]["resumed_from"].endswith("/step-20")
    for rank in (0, 1):
        (saved,) = re.findall(r"saved 20 with (\w+)", job.log(rank))
        assert f"begins at 20 with {saved}" in job.log(rank, 2)
    known = {
        one["path"].rpartition("/")[2]: (one["step"], one["complete"], one["whole"], one["resume"])
        for one in saves.listed(job.job.folder, job.job.plan(), verify=True)
    }
    assert known == {
        "step-10": (10, True, True, False), "step-20": (20, True, True, False),
        "step-30": (30, False, False, False), "step-40": (40, True, True, True),
    }  # fmt: skip
    assert (job.job.folder.checkpoints / ".step-30.torn-attempt-1").is_dir(), "no script finds it by itself"
