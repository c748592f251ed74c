"""Say who you are, count a little, and end: the smallest job, without torch, to see that a cluster works."""

from __future__ import annotations

import argparse
import os
import socket
import time


def main() -> None:
    """Print this rank's place in the job, then a number a second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3, help="how long to count")
    args = parser.parse_args()

    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    node, local_rank = os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"]
    print(
        f"hello from rank {rank} of {world_size}: node {node}, local rank {local_rank}, on {socket.gethostname()}",
        flush=True,
    )
    for second in range(1, args.seconds + 1):
        time.sleep(1)
        print(f"rank {rank} counts {second}", flush=True)
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    main()
