"""Do the launch lines of other launchers form one gang, wherever they stand in a job file?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.desk import TOGETHER
from tests.support.local import FAKE_TORCH, Desk

WORLD = {
    "train.py": TOGETHER
    + """
meet()
together(True)
print(f"one gang of {world_size}, arguments {sys.argv[1:]}", flush=True)
""",
    **FAKE_TORCH,
}
GLOO = """
import os
import torch.distributed as dist

dist.init_process_group("gloo")
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, (dist.get_rank(), os.getpid()))
print(f"one gang of {len({pid for _, pid in seen})}, arguments {__import__('sys').argv[1:]}", flush=True)
dist.destroy_process_group()
"""

LINES: dict[str, dict[str, Any]] = {
    "entrypoint": {"entrypoint": "torchrun --nproc-per-node 2 train.py --lr 0.1"},
    "module": {"entrypoint": "python -m torch.distributed.run --nproc_per_node=2 train.py --lr 0.1"},
    "command": {
        "command": "true && OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 train.py --lr 0.1 | tee log"
    },
    "accelerate": {"command": "accelerate launch --cpu --num_processes 2 train.py --lr 0.1"},
    "fabric": {"entrypoint": {"command": "fabric run --accelerator cpu --devices 2 train.py --lr 0.1"}},
}


@pytest.mark.parametrize("line", list(LINES))
def test_a_launch_line_forms_one_gang_of_its_size(desk: Desk, line: str) -> None:
    desk.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    files = {"train.py": GLOO} if line == "accelerate" else WORLD  # accelerate itself imports torch
    job = desk.submit(files, procs_per_node=None, **LINES[line])
    assert job.wait()["state"] == "SUCCEEDED", job.log()
    assert len(job.seen()["ranks"]) == 2
    assert "one gang of 2, arguments ['--lr', '0.1']" in job.log(0)


def test_nodes_and_ranks_of_a_line_are_those_of_the_job(desk: Desk) -> None:
    line = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host:29400 train.py"
    job = desk.submit({"train.py": GLOO}, nodes=None, procs_per_node=None, entrypoint=line)
    assert job.wait()["state"] == "SUCCEEDED", job.log()
    assert {rank["node"] for rank in job.seen()["ranks"]} == {"node-0", "node-1"}
    assert "one gang of 4, arguments []" in job.log(3)


def test_a_rank_that_fails_before_a_pipe_fails_the_job(desk: Desk) -> None:
    desk.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    job = desk.submit(
        {"train.py": "raise SystemExit(3)"},
        procs_per_node=None,
        command="torchrun --nproc-per-node 2 train.py | cat",
        restart={"max": 0},
    )
    assert job.wait()["state"] == "FAILED"
