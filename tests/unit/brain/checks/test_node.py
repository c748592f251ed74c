"""Is each fault of one node found with its fix, and nothing on a healthy one?"""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.brain.checks import node
from orchestrator.brain.checks.finding import Severity
from orchestrator.core.host_facts import UNLIMITED, FolderFacts, GpuUser, HostFacts, MissingImport

from .facts import FOLDER, GIB, GPU, HEALTHY, JOB, host, program

E, W = Severity.ERROR, Severity.WARNING
MISSING = (MissingImport("einops", "model.py", 3),)


def test_a_healthy_node_has_no_finding() -> None:
    assert list(node.findings("gpu01", HEALTHY, JOB)) == []
    assert list(node.findings("gpu01", host(program=None, gpus=()), JOB)) == []


@pytest.mark.parametrize(
    ("facts", "severity", "what", "words"),
    [
        (program(fault="libpython is missing"), E, "python", "the ranks' Python cannot be used: libpython is missing"),
        (program(syntax="train.py:3: SyntaxError: bad"), E, "script", "train.py:3: SyntaxError: bad"),
        (program(missing=MISSING), E, "import", "model.py:3: no module named einops"),
        (program(missing=MISSING, changes_path="train.py:1"), W, "import", "model.py:3: no module named einops, unless train.py:1 makes it importable"),
        (program(gpus=1), E, "gpus", "torch 2.13.0 sees 1 of 2 GPUs"),
        (host(folders=(dataclasses.replace(FOLDER, fault="/: read-only file system"),)), E, "folder", "/jobs cannot be written to: /: read-only file system"),
        (host(folders=(FolderFacts("/jobs", "", GIB, 10),)), W, "disk", "10 more files fit into /jobs: its disk is out of inodes"),
        (host(kernel="5.4.0-99-generic"), W, "kernel", "its kernel 5.4.0-99-generic is older than 5.5, with which Accelerate has seen jobs hang"),
        (host(shm_bytes=64 << 20), W, "shm", "/dev/shm has 64 MiB: workers of a DataLoader hand batches over there"),
        (host(shm_free_bytes=1 << 20), W, "shm", "/dev/shm has 1 MiB free of 32.0 GiB"),
        (host(cgroup_bytes=GIB), W, "memory", "a cgroup limits its memory to 1.0 GiB, for 2 ranks"),
        (host(open_files_max=256), W, "ulimit", "a process may open only 256 files (ulimit -n)"),
        (host(processes_max=100), W, "ulimit", "the user may have only 100 processes and threads (ulimit -u)"),
        (host(has_infiniband=True), W, "ulimit", "a process may lock only 8 MiB of memory (ulimit -l), which InfiniBand needs"),
        (host(unresolved=("gpu01: Name or service not known",)), W, "names", "names that it cannot look up: gpu01: Name or service not known"),
        (host(gpu_fault="`nvidia-smi -L` has not answered for 15 s"), E, "gpus", "`nvidia-smi -L` has not answered for 15 s"),
        (host(gpu_users=(GpuUser(77, "GPU-b", 300, "python a.py"),)), W, "gpus", "GPU 1: pid 77 (python a.py) uses 300 MiB"),
        (host(gpus=(GPU, dataclasses.replace(GPU, index="1", ecc_errors=3))), W, "gpus", "GPU 1 (A100) has 3 uncorrected ECC errors since its driver was loaded"),
        (host(gpus=(GPU, dataclasses.replace(GPU, slowdowns=("it is too hot",)))), W, "gpus", "GPU 0 (A100) runs at lowered clocks: it is too hot"),
        (host(xids=("NVRM: Xid (PCI:0000:3b:00): 79",)), W, "gpus", "its kernel reports failures of a GPU, the last one: NVRM: Xid (PCI:0000:3b:00): 79"),
    ],
)  # fmt: skip
def test_one_fault_is_one_finding(facts: HostFacts, severity: Severity, what: str, words: str) -> None:
    (found,) = node.findings("gpu01", facts, JOB)
    assert (found.severity, found.what, found.found) == (severity, what, words)
    assert found.fix and found.nodes == ("gpu01",)


def test_what_setup_lines_may_install_is_a_warning() -> None:
    job = dataclasses.replace(JOB, has_setup=True)
    (found,) = node.findings("gpu01", program(missing=MISSING), job)
    assert found.severity is W and "setup lines" in found.fix


def test_a_disk_must_hold_the_last_checkpoint_twice() -> None:
    job = dataclasses.replace(JOB, checkpoint_bytes=60 * GIB)
    (found,) = node.findings("gpu01", HEALTHY, job)
    assert found.found == (
        "100.0 GiB free in /jobs, and the last checkpoint had 60.0 GiB (120.0 GiB are needed while it is replaced)"
    )
    assert list(node.findings("gpu01", HEALTHY, dataclasses.replace(JOB, checkpoint_bytes=50 * GIB))) == []


def test_infiniband_with_unlimited_locked_memory_is_healthy() -> None:
    assert list(node.findings("gpu01", host(has_infiniband=True, locked_bytes_max=UNLIMITED), JOB)) == []


@pytest.mark.parametrize("kernel", ["5.5.0", "6.18.44-fc", "10.0", "odd", ""])
def test_newer_or_unknown_kernel_is_not_outdated(kernel: str) -> None:
    """A newer or unknown kernel is none of the outdated ones."""
    assert list(node.findings("gpu01", host(kernel=kernel), JOB)) == []


def test_clock_offset_counts_beyond_network_delay() -> None:
    assert [one.found for one in node.check_clock("a", -61.0, 0.1)] == ["its clock is 61 s behind"]
    assert [one.found for one in node.check_clock("a", 6.0, 0.1)] == ["its clock is 6 s ahead"]
    assert not list(node.check_clock("a", 6.0, 2.0)) and not list(node.check_clock("a", 1.0, 0.0))


def test_checkpoints_must_fit_into_memory() -> None:
    """Checkpoints that do not fit into memory are a warning: they would be written to disk."""
    job = dataclasses.replace(JOB, memory_bytes=64 * 10**9, memory_dir="/dev/shm", checkpoint_bytes=GIB)
    shm = FolderFacts("/dev/shm", "", 60 * 10**6, 1)
    (found,) = node.findings("gpu01", host(folders=(FOLDER, shm)), job)
    assert (found.severity, found.what) == (W, "memory") and found.nodes == ("gpu01",)
    assert found.found == ("checkpoints would be written to disk: checkpoint.memory is 64.0 GB, /dev/shm has 0.06 GB")
    roomy = dataclasses.replace(shm, free_bytes=100 * GIB)
    (found,) = node.findings("gpu01", host(folders=(roomy,), available_bytes=GIB), job)
    assert found.found.endswith("free memory of the host is 1.1 GB")
    assert not list(node.findings("gpu01", host(folders=(roomy,), available_bytes=100 * GIB), job))
    (found,) = node.findings("gpu01", host(folders=(dataclasses.replace(shm, fault="/: read-only file system"),)), job)
    assert found.found == "checkpoints would be written to disk: /: read-only file system"
    on_disk = dataclasses.replace(roomy, may_be_memory=False)
    (found,) = node.findings("gpu01", host(folders=(on_disk,), available_bytes=100 * GIB), job)
    assert found.found == "/dev/shm is on a disk: checkpoints there are not in memory" and found.severity is W
