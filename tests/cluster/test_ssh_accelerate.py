"""Hosts over SSH, which share no disk, get what `accelerate launch` would set from a file in the code."""

from __future__ import annotations

import json
from typing import Any

from tests.support.cluster.desk import LAUNCHED, Desk
from tests.support.packages import need

need("accelerate")

CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2},
    "mixed_precision": "bf16",
    "num_processes": 2,
}
SCRIPT = """
import os
names = ("RANK", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_OFFLOAD_PARAMS")
print("found", *(os.environ.get(name) for name in names), flush=True)
"""


def test_accelerate_environment_is_computed_on_the_host(desk: Desk) -> None:
    """A host computes the environment from its own copy of the code."""
    spec: dict[str, Any] = {"nodes": 1, "ssh": {"hosts": "node1"}, "env": {"FSDP_OFFLOAD_PARAMS": "mine"}}
    files = {"train.py": SCRIPT, "conf/fsdp.yaml": json.dumps(CONFIG)}
    job = desk.submit(files, entrypoint=None, launch="accelerate launch --config_file conf/fsdp.yaml train.py", **spec)
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    for rank in range(2):
        assert f"found {rank} bf16 true 2 mine" in job.log(rank)


SCRIPT_OF_CALLS = """
bash go.sh 2 || exit
echo "over on $SLURM_NODEID of $(scontrol show hostnames "$SLURM_JOB_NODELIST" | wc -l)"
"""


def test_script_runs_once_and_launched_gangs_restart(desk: Desk) -> None:
    """Hosts run a script once; its launcher calls are gangs that are restarted."""
    job = desk.submit(
        LAUNCHED,
        entrypoint=None,
        launch=SCRIPT_OF_CALLS,
        nodes=2,
        ssh={"hosts": "node[1-2]"},
        restart={"backoff": 0},
    )
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert job.kinds() == ["crash", None]
    for rank in range(4):
        assert [line for line in job.log(rank, 2).splitlines() if line.startswith("call")] == [
            "call ['first']",
            "call ['second']",
        ]
    for index, node in enumerate(("node1", "node2")):
        assert f"over on {index} of 2" in job.folder.node_log(2, node).read_text()
