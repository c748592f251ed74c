"""Hardware of this host as Linux shows it: CPUs, GPUs, interfaces.

What cannot be read is left out. The kernel alone is asked, which takes milliseconds and waits for no device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.core.host import interfaces
from orchestrator.core.host.procfs import cgroups, list_names, read_text
from orchestrator.core.host_facts import HardwareFacts
from orchestrator.core.settings.rank_settings import is_watched

_GPUS = "proc/driver/nvidia/gpus"


def gather(environ: Mapping[str, str], root: Path = Path("/")) -> HardwareFacts:
    """Return what this host has for ranks, and what is set.

    `environ` is the environment that ranks inherit here; `root` has /proc and /sys.
    """
    cpus = os.sched_getaffinity(0)
    slurm = environ.get("SLURM_CPUS_ON_NODE", "")
    return HardwareFacts(
        cpus=len(cpus),
        cores=_cores(root, cpus),
        quota_cpus=_quota_cpus(root),
        slurm_cpus=int(slurm) if slurm.isdecimal() else None,
        gpus=tuple(list_names(root / _GPUS)),  # in a container only its own,
        interfaces=interfaces.list_addresses(),
        environ={name: value for name, value in environ.items() if is_watched(name)},
    )


def _cores(root: Path, cpus: Iterable[int]) -> int:
    """Return how many physical cores the CPUs belong to; where the kernel does not tell, each is one."""
    folder = root / "sys/devices/system/cpu"
    siblings = {cpu: read_text(folder / f"cpu{cpu}/topology/thread_siblings_list").strip() for cpu in cpus}
    return len({names or f"cpu{cpu}" for cpu, names in siblings.items()})


def _quota_cpus(root: Path) -> float | None:
    quotas = [_quota(folder, is_v2=is_v2) for folder, is_v2 in cgroups("cpu", root)]
    return min((quota for quota in quotas if quota), default=None)


def _quota(folder: Path, *, is_v2: bool) -> float | None:
    if is_v2:
        words = read_text(folder / "cpu.max").split()
    else:
        words = [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None  # `max`, or -1: no limit
    return int(words[0]) / int(words[1])
