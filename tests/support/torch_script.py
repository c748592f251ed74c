"""Scripts of tests with the real torch: how they start it at half of its cost, without torch._dynamo, 820 modules that none of them
uses; and how they end under torchrun alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

RUN_S_MAX = 180.0

WITHOUT_DYNAMO = """
import torch

torch.set_num_threads(1)
for function in vars(torch.optim.Optimizer).values():  # else the first call of each imports torch._dynamo
    if hasattr(function, "__wrapped__"):
        setattr(function.__wrapped__, "__dynamo_disable", function.__wrapped__)
for kind in (torch.optim.SGD, torch.optim.AdamW):  # and so does the first step
    kind.step = torch.no_grad()(kind.step.__wrapped__)

"""
"""The beginning of a script. DistributedDataParallel imports it all the same, so it stands where it is what is tested."""


def under_torchrun(folder: Path, script: str, env: Mapping[str, str]) -> list[str]:
    """Return what both ranks of a script print behind `weights` under torchrun, with no orch."""
    (folder / "train.py").write_text(script)
    words = ["--standalone", "--nproc-per-node=2", "--redirects=3", "--log-dir=logs", "train.py"]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words], cwd=folder, env={**os.environ, **env}, check=True,
        timeout=RUN_S_MAX,
    )  # fmt: skip
    logs = sorted(folder.glob("logs/*/attempt_0/*/stdout.log"))
    return [re.findall("^weights (.+)$", log.read_text(), re.MULTILINE)[0] for log in logs]
