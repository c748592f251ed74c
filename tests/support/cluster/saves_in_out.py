"""A script that saves in `out/` and resumes from the newest file there by itself, with a stand-in for torch."""

from __future__ import annotations

from typing import Any

from tests.support.cluster.desk import FAKE_TORCH, TOGETHER, Job
from tests.support.torch_saves import STAND_IN

SAVES_IN_OUT = (
    TOGETHER
    + """
import torch

Path("out").mkdir(exist_ok=True)
found = sorted(Path("out").glob("net_*.pth"))
start = torch.load(str(found[-1]))["step"] if found else 0
print("begins from", found[-1] if found else None, flush=True)


def save(step):
    if rank == 0 and step % 20 == 1 and step > start + 1:
        torch.save({"model": {"weight": array.array("d", range(64))}, "step": step - 1}, f"out/net_{step - 1:04d}.pth")
        Path("out/metrics.json").write_text(str(step))
    together(True)


meet()
run(10**9 if attempt == 1 else 200, each_s=0.05, at_step=save, start=start)
"""
).replace("import torch\n", "import array\nimport torch\n", 1)

FILES = {**FAKE_TORCH, **STAND_IN, "train.py": SAVES_IN_OUT}


def assert_began_by_its_own_choice(job: Job, attempt: dict[str, Any]) -> None:
    """An attempt began from the file that its script says, and its steps are counted on from there."""
    log = job.log(0, attempt["attempt"]).splitlines()
    said = next(line for line in log if line.startswith("begins from out/net_"))
    began = attempt["began_from"]
    assert began["path"].endswith(said.removeprefix("begins from ")), (said, began)
    assert (began["chosen_by"], attempt["first_step"]) == ("script", began["step"] + 1)
