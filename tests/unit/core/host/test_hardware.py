"""Is a host's hardware read from /proc and /sys as Linux writes it, and is what is missing left out?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.core.host import hardware


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_gpus_are_found(tmp_path: Path) -> None:
    root = _write(tmp_path, {
        "proc/driver/nvidia/gpus/0000:1B:00.0/information": "Model: H100\n",
        "proc/driver/nvidia/gpus/0000:43:00.0/information": "Model: H100\n",
    })  # fmt: skip
    facts = hardware.gather({"NCCL_DEBUG": "INFO", "PATH": "/bin", "SLURM_CPUS_ON_NODE": "16"}, root=root)
    assert facts.gpus == ("0000:1B:00.0", "0000:43:00.0")
    assert (facts.environ, facts.slurm_cpus) == ({"NCCL_DEBUG": "INFO"}, 16)


def test_host_without_information_has_its_cpus(tmp_path: Path) -> None:
    """A host that shows nothing has its CPUs."""
    facts = hardware.gather({}, root=tmp_path)
    count = len(os.sched_getaffinity(0))
    assert (facts.cpus, facts.cores, facts.quota_cpus, facts.slurm_cpus) == (count, count, None, None)
    assert facts.gpus == ()


def test_threads_of_one_core_are_one_core(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    together = f"{cpus[0]}-{cpus[-1]}"
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = _write(tmp_path, {topology.format(cpu): together for cpu in cpus})
    assert hardware.gather({}, root=root).cores == 1


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/not/here\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "4:memory:/x\n2:cpu,cpuacct:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "150000\n", "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({"proc/self/cgroup": "2:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"proc/self/cgroup": "damaged\n"}, None),
    ],
)  # fmt: skip
def test_cgroup_cpu_quota_is_read_in_both_versions(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert hardware.gather({}, root=_write(tmp_path, files)).quota_cpus == quota
