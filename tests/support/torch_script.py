"""How the scripts of tests start torch at half of its cost: without torch._dynamo, 820 modules that none of them uses."""

from __future__ import annotations

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
