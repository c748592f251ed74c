"""Facts of a healthy node, for tests to change one of."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.brain.checks.node import JobNeeds
from orchestrator.core.host_facts import UNKNOWN, UNLIMITED, FolderFacts, GpuFacts, HostFacts, ProgramFacts

GIB = 1 << 30
PROGRAM = ProgramFacts(python="3.11.7", torch="2.13.0", cuda="12.6", nccl="2.27.5", gpus=2)
GPU = GpuFacts("0", "GPU-a", "A100", "535.1", 40960, 0, ())
FOLDER = FolderFacts("/jobs", "", 100 * GIB, 1_000_000)
HEALTHY = HostFacts(
    hostname="gpu01", kernel="6.1.0-13-amd64", memory_bytes=64 * GIB, cgroup_bytes=UNKNOWN, shm_bytes=32 * GIB,
    shm_free_bytes=32 * GIB, open_files_max=1024, processes_max=30000, locked_bytes_max=8 << 20, has_infiniband=False,
    folders=(FOLDER,), unresolved=(), gpus=(GPU, dataclasses.replace(GPU, index="1", uuid="GPU-b")), gpu_users=(),
    gpu_fault="", xids=(), program=PROGRAM,
)  # fmt: skip
JOB = JobNeeds(ranks_each=2, gpus_each=2, has_setup=False, checkpoint_bytes=UNKNOWN)

assert HEALTHY.locked_bytes_max < UNLIMITED


def host(**changes: Any) -> HostFacts:
    """Return the facts of a healthy node with some changes."""
    return dataclasses.replace(HEALTHY, **changes)


def program(**changes: Any) -> HostFacts:
    """Return the facts of a healthy node whose ranks' Python differs."""
    return host(program=dataclasses.replace(PROGRAM, **changes))
