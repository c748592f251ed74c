"""Scripts that resume in their own way: nanoGPT's `ckpt.pt` in `out/`, written in place, and the `snapshot.pt` of torch's DDP
tutorial, from which the script goes on by itself. With a stand-in for torch that writes files as torch does.
"""

from __future__ import annotations

import re

import pytest

from orchestrator.client import adoption, job_checkpoints
from orchestrator.views import cells, post_mortem
from tests.support.local import Desk, Sight
from tests.support.torch_saves import STAND_IN

HEAD = """
import array, os, signal, sys, time
import torch
from torch.optim.optimizer import Optimizer
import colorsys  # any import after torch lets the hook see that it is there

rank, attempt = int(os.environ["RANK"]), int(os.environ["ORCH_ATTEMPT"])
optimizer, weights = Optimizer(), array.array("d", range(64))

def step():
    time.sleep(0.02)  # longer than the coarse time of a file that was just saved is behind
    optimizer.step()

def meet(where):
    open(f"{where}-{attempt}-{rank}", "w").close()
    while not os.path.exists(f"{where}-{attempt}-{1 - rank}"):
        time.sleep(0.02)

def die():
    meet("end")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""

NANO_GPT = (
    HEAD
    + """
out_dir, init_from = "out", "scratch"
for word in sys.argv[1:]:  # as nanoGPT's configurator.py reads them
    key, _, value = word.removeprefix("--").partition("=")
    assert word.startswith("--") and key in globals(), word
    globals()[key] = value
os.makedirs(out_dir, exist_ok=True)
iter_num = 0
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    weights, iter_num = checkpoint["model"]["weight"], checkpoint["iter_num"]
    meet("loaded")  # rank 0 overwrites the file that the other reads
print("begins at", iter_num, "in", out_dir, flush=True)
while iter_num < 60:
    if iter_num % 10 == 0 and iter_num and rank == 0:
        torch.save({"model": {"weight": weights}, "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    step()
    iter_num += 1
    if attempt == 1 and iter_num == 45:
        die()
"""
)

TUTORIAL = (
    HEAD
    + """
epochs_run = 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt")
    weights, epochs_run = snapshot["MODEL_STATE"]["weight"], snapshot["EPOCHS_RUN"]
    print(f"Resuming training from snapshot at Epoch {epochs_run}", flush=True)
for epoch in range(epochs_run, 8):
    for _ in range(10):
        step()
    print(f"Epoch {epoch} | loss {8 - epoch}", flush=True)
    if int(os.environ["LOCAL_RANK"]) == 0 and epoch % 2 == 0:
        torch.save({"MODEL_STATE": {"weight": weights}, "EPOCHS_RUN": epoch}, "snapshot.pt")
        print(f"Epoch {epoch} | Training snapshot saved", flush=True)
    if attempt == 1 and epoch == 5:
        die()
"""
)


def why(job: Sight) -> str:
    """Return what `orch why` shows."""
    return cells.plain_text(post_mortem.post_mortem(job.job.why()))


def test_nanogpt_resumes_from_checkpoint_overwritten_in_place(desk: Desk) -> None:
    job = desk.submit(
        {**STAND_IN, "train.py": NANO_GPT}, procs_per_node=2, entrypoint="train.py --out_dir={checkpoint_dir}",
        checkpoint={"path": "ckpt.pt", "resume_args": "--init_from=resume"},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    folder = job.job.folder.checkpoints
    assert f"begins at 0 in {folder}" in job.log(0)
    assert f"begins at 40 in {folder}" in job.log(1, 2)
    assert job.attempts()[1]["resumed_from"] == str(folder / "ckpt.pt")
    assert not (job.job.folder.code / "out").exists()


@pytest.mark.parametrize("path", ["*", pytest.param("{job_dir}/code/snapshot.pt", marks=pytest.mark.soak)])
def test_checkpoints_in_start_folder_and_resume_are_recognised(desk: Desk, path: str) -> None:
    """Checkpoints in the start folder are recognised, and so is the one that the script resumes from."""
    job = desk.submit(
        {**STAND_IN, "train.py": TUTORIAL}, procs_per_node=2, entrypoint="train.py", checkpoint={"path": path}
    )
    status = job.wait()
    assert status["state"] == "SUCCEEDED", job.job.why()
    assert "Resuming training from snapshot at Epoch 4" in job.log(0, 2)
    snapshot = job.job.folder.code / "snapshot.pt"
    second = job.job.why()["attempts"][1]
    assert second["resumed_from"] == second["began_from"]["path"] == str(snapshot)
    assert second["began_from"]["chosen_by"] == ("script" if path == "*" else "orch")
    assert second["first_step"] == 51
    assert (
        adoption.find_adoptable(job.job.folder, job.job.plan(), job_checkpoints.load_checkpoints(job.job.folder)) == []
    )
    (last,) = [
        one for one in job_checkpoints.list_checkpoints(job.job.folder, job.job.plan(), verify=True) if one["resume"]
    ]
    assert (last["path"], last["whole"]) == (str(snapshot), True)
    assert "snapshot.pt" in why(job)
    assert re.search(r"loss in the log of rank 0: from 4 to 1; in attempt 1 from 8 to [34]\b", why(job))
