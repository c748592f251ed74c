"""Use of the host's GPUs, from nvidia-smi where it is installed, within a bounded time; in inspections and all the time."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.core.host import gpus

NVIDIA_SMI_S_MAX = 5.0
ASK_S = 20.0
"""How often it is asked all the time: two tables, so once in ten seconds."""

OLD_S = 90.0
"""An older answer is none."""

TEXT_CHARS_MAX = 1 << 20

_MEBIBYTES = re.compile(r"(\d{1,12}) MiB")
_QUERY = "index,uuid,name,utilization.gpu,utilization.memory,memory.used,power.draw,pstate"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The output of nvidia-smi, and what it says of each process."""

    text: str
    # By process, how busy its GPU was, 0.0 to 1.0: the share of the last second at most in which a kernel ran there.
    shares: Mapping[int, float]
    # Bytes on GPUs by process, and share and bytes by GPU: its number and its UUID
    process_bytes: Mapping[int, int] = field(default_factory=dict)
    devices: Mapping[str, tuple[float | None, int | None]] = field(default_factory=dict)

    def of(self, pids: Iterable[int], device: str) -> tuple[float | None, int | None]:
        """Return share and bytes of a rank: of its processes where they are known, as they are not in a container, else
        of its GPU."""
        ours = list(pids)
        share, size_bytes = self.devices.get(device, (None, None))
        shares = [self.shares[pid] for pid in ours if pid in self.shares]
        sizes_bytes = [self.process_bytes[pid] for pid in ours if pid in self.process_bytes]
        return max(shares, default=share), sum(sizes_bytes) if sizes_bytes else size_bytes

    def share(self, pid: int) -> tuple[float | None, str]:
        """Return how busy the GPU of a process was, or None and the reason why that is not known."""
        if not self.text:
            return None, "nvidia-smi is not there, so the use of GPUs is not known"
        if pid not in self.shares:
            return None, "nvidia-smi does not say which GPU the process uses"
        return self.shares[pid], ""


NOTHING = GpuUse("", {})


def gpu_use() -> GpuUse:
    """Return the use of every GPU of the host and its processes; an empty text where nvidia-smi is missing."""
    tool = gpus.program()
    if tool is None:
        return NOTHING
    use = _output(tool, f"--query-gpu={_QUERY}")
    users = _output(tool, "--query-compute-apps=pid,gpu_uuid,used_memory")
    text = f"{use.rstrip()}\n\n{users.rstrip()}\n"
    return GpuUse(text, gpu_shares(use, users), _process_bytes(users), _devices(use))


class GpuWatch:
    """The use of the host's GPUs, asked for in a thread: nvidia-smi may take seconds."""

    def __init__(self) -> None:
        self._is_there = gpus.program() is not None
        self._due_s = self._asked_s = 0.0
        self._thread: threading.Thread | None = None
        self._latest = NOTHING

    def latest(self, now_s: float) -> GpuUse:
        """Return the last answer, and ask again when that is due."""
        if self._is_there and now_s >= self._due_s and (self._thread is None or not self._thread.is_alive()):
            self._due_s = now_s + ASK_S
            self._thread = threading.Thread(target=self._ask, args=(now_s,), name="gpus", daemon=True)
            self._thread.start()
        return self._latest if now_s < self._asked_s + OLD_S else NOTHING

    def _ask(self, now_s: float) -> None:
        self._latest, self._asked_s = gpu_use(), now_s


def gpu_shares(use: str, users: str) -> dict[int, float]:
    """Return how busy each process's GPU is, the busiest of several, from nvidia-smi's two tables (`--format=csv`)."""
    busy = {words[1]: words[3].removesuffix("%").strip() for words in gpus.rows(use) if len(words) > 3}
    shares: dict[int, float] = {}
    for words in gpus.rows(users):
        percent = busy.get(words[1], "") if len(words) > 1 else ""  # not known for a part of a GPU (MIG)
        if words[0].isdigit() and percent.isdigit():
            shares[int(words[0])] = max(int(percent) / 100, shares.get(int(words[0]), 0.0))
    return shares


def _process_bytes(users: str) -> dict[int, int]:
    """Return the bytes of each process on all its GPUs."""
    sizes_bytes: dict[int, int] = {}
    for words in gpus.rows(users):
        size_bytes = _bytes(words[2]) if len(words) > 2 and words[0].isdigit() else None
        if size_bytes is not None:
            sizes_bytes[int(words[0])] = sizes_bytes.get(int(words[0]), 0) + size_bytes
    return sizes_bytes


def _devices(use: str) -> dict[str, tuple[float | None, int | None]]:
    devices: dict[str, tuple[float | None, int | None]] = {}
    for words in gpus.rows(use):
        if len(words) > 5 and words[0].isdigit():
            percent = words[3].removesuffix("%").strip()
            share = int(percent) / 100 if percent.isdigit() else None
            devices[words[0]] = devices[words[1]] = share, _bytes(words[5])
    return devices


def _bytes(cell: str) -> int | None:
    found = _MEBIBYTES.fullmatch(cell)
    return int(found[1]) << 20 if found else None


def _output(tool: str, *options: str) -> str:
    """Run nvidia-smi and return its output, or how it failed.

    The exit code is not checked: the agent may have reaped the program before this thread does.
    """
    try:
        done = gpus.run(tool, *options, "--format=csv", limit_s=NVIDIA_SMI_S_MAX)
    except gpus.GpuError as err:
        return str(err)
    return (done.stdout + done.stderr)[:TEXT_CHARS_MAX]
