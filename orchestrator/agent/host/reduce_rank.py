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


def reduce(asked: dict[str, Any]) -> str:
    """Take part, and return the fault."""
    import torch
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=asked["group_s_max"])
    store = f"tcp://{asked['address']}:{asked['port']}"
    on_gpu = bool(asked["on_gpu"]) and torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=store,
        rank=asked["rank"],
        world_size=asked["world"],
        timeout=limit,
    )
    ones = torch.ones(ELEMENTS, device="cuda:0" if on_gpu else "cpu")
    dist.all_reduce(ones)
    total = float(ones.sum())
    dist.barrier()
    dist.destroy_process_group()
    wanted = float(asked["world"] * ELEMENTS)
    return "" if total == wanted else f"the sum is {total:g}, and should be {wanted:g}"


def main() -> None:
    """Take part once."""
    asked = json.loads(sys.stdin.read())
    try:
        fault = reduce(asked)
    except BaseException as err:
        lines = str(err).strip().splitlines() or [""]
        fault = f"{type(err).__name__}: {lines[0]}"
    print()
    print(json.dumps({"fault": fault}), flush=True)


if __name__ == "__main__":
    main()
