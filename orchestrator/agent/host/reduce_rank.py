"""One rank of a trial all-reduce, run by the ranks' own Python and torch (3.8 or newer): sums ones over all nodes.

It reads one JSON object from standard input, and prints one as its last line, with the fault or an empty text.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

ELEMENTS = 1 << 18
"""A megabyte: more than what goes out in one packet."""


def all_reduce(request: dict[str, Any]) -> str:
    """Take part, and return the fault."""
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
    total = float(ones.sum())
    dist.barrier()
    dist.destroy_process_group()
    expected = float(request["world"] * ELEMENTS)
    return "" if total == expected else f"the sum is {total:g}, and should be {expected:g}"


def main() -> None:
    """Take part once."""
    request = json.loads(sys.stdin.read())
    try:
        fault = all_reduce(request)
    except BaseException as err:
        lines = str(err).strip().splitlines() or [""]
        fault = f"{type(err).__name__}: {lines[0]}"
    print()
    print(json.dumps({"fault": fault}), flush=True)


if __name__ == "__main__":
    main()
