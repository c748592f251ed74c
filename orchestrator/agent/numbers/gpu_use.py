"""Use of the host's GPUs, from nvidia-smi where it is installed, within a bounded time; in inspections and periodically."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus

NVIDIA_SMI_S_MAX = 5.0
ASK_S = 20.0
"""How often it is asked periodically: two tables, so once in ten seconds."""

OLD_S = 90.0
"""An older answer does not count."""

TEXT_CHARS_MAX = 1 << 20

_MEBIBYTES = re.compile(r"(\d{1,12}) MiB")
_QUERY = "index,uuid,name,utilization.gpu,utilization.memory,memory.used,power.draw,pstate"


Use = tuple[float | None, int | None]
"""How busy a GPU was, 0.0 to 1.0: the share of the last second at most in which a kernel ran there; and bytes of its memory.
None: not known."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The output of nvidia-smi, and what it says of each GPU and process."""

    text: str = ""
    # By number and by UUID
    devices: Mapping[str, Use] = field(default_factory=dict)
    # On each of the process's GPUs
    processes: Mapping[int, list[Use]] = field(default_factory=dict)

    def of(self, pids: Iterable[int], device: str) -> Use:
        """Return share and bytes of a rank: of its processes where they are known, as they are not in a container, else
        of its GPU."""
        uses = [use for pid in pids for use in self.processes.get(pid, ())]
        shares = [share for share, _ in uses if share is not None]
        sizes_bytes = [size_bytes for _, size_bytes in uses if size_bytes is not None]
        share, size_bytes = self.devices.get(device, (None, None))
        return max(shares, default=share), sum(sizes_bytes) if sizes_bytes else size_bytes

    def share(self, pid: int) -> tuple[float | None, str]:
        """Return how busy the GPU of a process was, or None and the reason why that is not known."""
        if not self.text:
            return None, "nvidia-smi is not installed, so GPU use is not known"
        share, _ = self.of([pid], "")
        return share, "nvidia-smi does not say which GPU the process uses" if share is None else ""


NOTHING = GpuUse()


def gpu_use() -> GpuUse:
    """Return the use of every GPU of the host and its processes; an empty text where nvidia-smi is missing."""
    tool = gpus.program()
    if tool is None:
        return NOTHING
    use = _output(tool, f"--query-gpu={_QUERY}")
    users = _output(tool, "--query-compute-apps=pid,gpu_uuid,used_memory")
    return parsed(use, users)


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


def parsed(use: str, users: str) -> GpuUse:
    """Return what nvidia-smi's tables of GPUs and of processes say (`--format=csv`)."""
    devices: dict[str, Use] = {}
    for words in gpus.rows(use):
        if len(words) > 3 and words[0].isdigit():
            percent = words[3].removesuffix("%").strip()
            share = int(percent) / 100 if percent.isdigit() else None
            devices[words[0]] = devices[words[1]] = share, _bytes(words[5:6])
    processes: dict[int, list[Use]] = {}
    for words in gpus.rows(users):
        if len(words) > 1 and words[0].isdigit():
            share, _ = devices.get(words[1], (None, None))  # not known for a part of a GPU (MIG)
            processes.setdefault(int(words[0]), []).append((share, _bytes(words[2:3])))
    return GpuUse(f"{use.rstrip()}\n\n{users.rstrip()}\n", devices, processes)


def _bytes(cells: list[str]) -> int | None:
    found = _MEBIBYTES.fullmatch("".join(cells))
    return int(found[1]) << 20 if found else None


def _output(tool: str, *options: str) -> str:
    """Run nvidia-smi and return its output, or how it failed.

    The exit code is not checked: the agent may have reaped the program before this thread does.
    """
    try:
        done = gpus.run(tool, *options, "--format=csv", limit_s=NVIDIA_SMI_S_MAX)
    except HostError as err:
        return str(err)
    return (done.stdout + done.stderr)[:TEXT_CHARS_MAX]
