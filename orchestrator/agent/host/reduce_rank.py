"""One rank of a trial all-reduce, run by the ranks' own Python and torch (3.8 or newer): sums ones over all nodes.

It reads one JSON object from standard input, and prints one as its last line, with the fault or an empty text, and the speed if
that was asked for.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from typing import Any

ELEMENTS = 1 << 18
"""A megabyte: more than what goes out in one packet."""

SPEED_ELEMENTS, GPU_SPEED_ELEMENTS = 1 << 22, 1 << 25


def all_reduce(request: dict[str, Any]) -> dict[str, Any]:
    """Take part, and return the fault, and how many GB/s each of the ranks sends."""
    import torch
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=request["group_s_max"])
    store = f"tcp://{request['address']}:{request['port']}"
    on_gpu = bool(request["on_gpu"]) and torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=store,
        rank=request["rank"],
        world_size=request["world"],
        timeout=limit,
    )
    ones = torch.ones(ELEMENTS, device="cuda:0" if on_gpu else "cpu")
    dist.all_reduce(ones)
    total, expected = float(ones.sum()), float(request["world"] * ELEMENTS)
    fault = "" if total == expected else f"the sum is {total:g}, and should be {expected:g}"
    speed = 0.0
    if request["seconds"] and not fault:
        data = torch.zeros(GPU_SPEED_ELEMENTS if on_gpu else SPEED_ELEMENTS, device=ones.device)
        n_bytes = 8e-9 * data.numel() * (1 - 1 / request["world"])
        dist.all_reduce(data)
        began_s, count = time.monotonic(), 0
        while not float(data[0]):  # all of them stop after the same one
            data[0] = float(request["rank"] == 0 and time.monotonic() - began_s > request["seconds"])
            dist.all_reduce(data)
            count += 1
        speed = n_bytes * count / (time.monotonic() - began_s)
    dist.barrier()
    dist.destroy_process_group()
    return {"fault": fault, "speeds": {"all-reduce": [speed]}}


def main() -> None:
    """Take part once."""
    request = json.loads(sys.stdin.read())
    try:
        result = all_reduce(request)
    except BaseException as err:
        lines = str(err).strip().splitlines() or [""]
        result = {"fault": f"{type(err).__name__}: {lines[0]}"}
    print()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
