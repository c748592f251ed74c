"""Hardware of this host as Linux shows it: CPUs, GPUs, InfiniBand and RoCE ports, interfaces.

What cannot be read is left out. `gather` reads files of the kernel alone, within milliseconds, so that an agent may call it;
`gather_all` asks devices and nvidia-smi, too, which a faulty device can hold up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.core.host import cgroups, gpus, interfaces
from orchestrator.core.host.procfs import text
from orchestrator.core.observations import Address
from orchestrator.core.settings.hardware_facts import (
    HardwareFacts,
    NetInterface,
    RdmaPort,
)
from orchestrator.core.settings.rank_settings import is_watched
from orchestrator.core.text import counted

_GPUS = "proc/driver/nvidia/gpus"
_MARKUP = re.compile(r"\x1b\[[0-9;]*m")


def gather(environ: Mapping[str, str], root: Path = Path("/")) -> HardwareFacts:
    """Return the facts that values of settings follow from: CPUs, GPUs, and what is set.

    `environ` is the environment that ranks inherit here; `root` has /proc and /sys.
    """
    cpus = os.sched_getaffinity(0)
    slurm = environ.get("SLURM_CPUS_ON_NODE", "")
    return HardwareFacts(
        cpus=len(cpus),
        cores=_cores(root, cpus),
        quota_cpus=_quota_cpus(root),
        slurm_cpus=int(slurm) if slurm.isdecimal() else None,
        gpus=tuple(_names(root / _GPUS)),  # in a container only its own,
        environ={name: value for name, value in environ.items() if is_watched(name)},
    )


def gather_all(environ: Mapping[str, str], root: Path = Path("/")) -> HardwareFacts:
    """Return all facts, with ports, interfaces and the links between GPUs. nvidia-smi has `gpus.LIST_S_MAX`."""
    facts = gather(environ, root)
    return dataclasses.replace(
        facts,
        gpu_links=gpu_links() if len(facts.gpus) > 1 else "",
        rdma=_rdma(root),
        interfaces=tuple(_interface(root, address) for address in interfaces.addresses()),
    )


def _interface(root: Path, address: Address) -> NetInterface:
    speed_mbit_s = _number(root / "sys/class/net" / address.interface / "speed")
    return NetInterface(address.interface, address.ip, max(0, speed_mbit_s or 0))


def _cores(root: Path, cpus: Iterable[int]) -> int:
    """Return how many physical cores the CPUs belong to; where the kernel does not tell, each is one."""
    folder = root / "sys/devices/system/cpu"
    siblings = {cpu: text(folder / f"cpu{cpu}/topology/thread_siblings_list").strip() for cpu in cpus}
    return len({names or f"cpu{cpu}" for cpu, names in siblings.items()})


def _quota_cpus(root: Path) -> float | None:
    quotas = [_quota(folder, is_v2=is_v2) for folder, is_v2 in cgroups.folders("cpu", root)]
    return min((quota for quota in quotas if quota), default=None)


def _quota(folder: Path, *, is_v2: bool) -> float | None:
    if is_v2:
        words = text(folder / "cpu.max").split()
    else:
        words = [text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None  # `max`, or -1: no limit
    return int(words[0]) / int(words[1])


def _rdma(root: Path) -> tuple[RdmaPort, ...]:
    folder, ports = root / "sys/class/infiniband", []
    for device in _names(folder):
        for port in _names(folder / device / "ports"):
            here = folder / device / "ports" / port
            state = text(here / "state").strip().rpartition(" ")[2]  # `4: ACTIVE`
            is_roce = text(here / "link_layer").strip() == "Ethernet"
            if port.isdecimal() and state:
                ports.append(RdmaPort(device, int(port), state, text(here / "rate").strip(), is_roce))
    return tuple(ports)


def gpu_links() -> str:
    """Return how this host's GPUs are connected, as `nvidia-smi topo -m` has it; empty where it does not answer."""
    tool = gpus.program()
    if tool is None:
        return ""
    with contextlib.suppress(gpus.GpuError):
        done = gpus.run(tool, "topo", "-m", limit_s=gpus.LIST_S_MAX)
        if done.returncode == 0:
            return links_text(done.stdout)
    return ""


def links_text(matrix: str) -> str:
    """Return the links among GPUs in the matrix that `nvidia-smi topo -m` prints, in words; empty for a single GPU."""
    rows = [_MARKUP.sub("", line).split() for line in matrix.splitlines()]
    count = next(
        (sum(word.startswith("GPU") and word[3:].isdecimal() for word in row) for row in rows if row), 0
    )
    table = [row[1 : count + 1] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    links = Counter(link for number, row in enumerate(table) for link in row[number + 1 :])
    if not links:
        return ""
    if len(links) == 1:
        return f"{next(iter(links))} between all {len(table)} GPUs"
    return ", ".join(f"{link} between {counted(pairs, 'pair')}" for link, pairs in sorted(links.items()))


def _number(path: Path) -> int | None:
    try:
        return int(text(path))
    except ValueError:
        return None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 -- names alone
    except OSError:
        return []
