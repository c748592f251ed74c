"""Use of the host's GPUs, from nvidia-smi where it is installed, within a bounded time; in inspections and periodically."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.agent.numbers.gpu_states import NVIDIA_SMI_S_MAX, GpuStates
from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus
from orchestrator.core.wire import reports

POLL_S = 20.0
"""How often it is asked periodically: three tables, and the links of GPUs that have any, so once in five seconds."""

STALE_S = 90.0
"""An older answer does not count."""

TEXT_CHARS_MAX = 1 << 20

_MEBIBYTES = re.compile(r"(\d{1,12}) MiB")
_QUERY = "index,uuid,name,utilization.gpu,utilization.memory,memory.used,power.draw,pstate"


DeviceUse = tuple[float | None, int | None]
"""How busy a GPU was, 0.0 to 1.0: the share of the last second at most in which a kernel ran there; and bytes of its memory.
None: not known."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The output of nvidia-smi, and what it says of each GPU and process."""

    text: str = ""
    # By number and by UUID
    devices: Mapping[str, DeviceUse] = field(default_factory=dict)
    # On each of the process's GPUs
    processes: Mapping[int, list[DeviceUse]] = field(default_factory=dict)
    # By number and by UUID: the processes on each GPU, and their bytes of its memory
    users: Mapping[str, list[tuple[int, int | None]]] = field(default_factory=dict)

    def rank_use(self, pids: Iterable[int], device: str) -> DeviceUse:
        """Return share and bytes of a rank: of its processes where they are known, as they are not in a container, else
        of its GPU."""
        uses = [use for pid in pids for use in self.processes.get(pid, ())]
        shares = [share for share, _ in uses if share is not None]
        sizes_bytes = [size_bytes for _, size_bytes in uses if size_bytes is not None]
        share, size_bytes = self.devices.get(device, (None, None))
        return max(shares, default=share), sum(sizes_bytes) if sizes_bytes else size_bytes

    def process_share(self, pid: int) -> tuple[float | None, str]:
        """Return how busy the GPU of a process was, or None and the reason why that is not known."""
        if not self.text:
            return None, "nvidia-smi is not installed, so GPU use is not known"
        share, _ = self.rank_use([pid], "")
        return share, "nvidia-smi does not say which GPU the process uses" if share is None else ""


NO_USE = GpuUse()


def read_gpu_use() -> GpuUse:
    """Return the use of every GPU of the host and its processes; an empty text where nvidia-smi is missing."""
    tool = gpus.find_nvidia_smi()
    return NO_USE if tool is None else _read_use(tool)


def _read_use(tool: str) -> GpuUse:
    use = _run_tool(tool, f"--query-gpu={_QUERY}")
    users = _run_tool(tool, "--query-compute-apps=pid,gpu_uuid,used_memory")
    return parse_tables(use, users)


class GpuPoller:
    """Use and states of the host's GPUs, asked for in a thread: nvidia-smi may take seconds."""

    def __init__(self) -> None:
        self.states = GpuStates()
        self._tool = gpus.find_nvidia_smi()
        self._is_hurried = False
        self._due_s = self._asked_s = 0.0
        self._thread: threading.Thread | None = None
        self._latest = NO_USE

    def latest(self, now_s: float) -> GpuUse:
        """Return the last answer, and ask again when that is due."""
        is_due = now_s >= self._due_s or self._is_hurried
        if self._tool is not None and is_due and (self._thread is None or not self._thread.is_alive()):
            self._due_s, self._is_hurried = now_s + POLL_S, False
            self._thread = threading.Thread(target=self._poll, args=(self._tool, now_s), name="gpus", daemon=True)
            self._thread.start()
        return self._latest if now_s < self._asked_s + STALE_S else NO_USE

    def note_bad_exit(self) -> None:
        """Ask at the next `report_states`: a rank has ended badly, perhaps because of its GPU."""
        self._is_hurried = True

    def report_states(self, now_s: float, attempt: int, report: Callable[[reports.GpusChanged], None]) -> None:
        """Report the states of the GPUs if they have changed."""
        if self._is_hurried:
            self.latest(now_s)
        if (states := self.states.take_news(now_s)) is not None:
            report(reports.GpusChanged(attempt, states))

    def _poll(self, tool: str, now_s: float) -> None:
        self.states.ask(tool)  # first: the next attempt may begin before the rest is known
        self._latest, self._asked_s = _read_use(tool), now_s


def parse_tables(use: str, users: str) -> GpuUse:
    """Return what nvidia-smi's tables of GPUs and of processes say (`--format=csv`)."""
    devices: dict[str, DeviceUse] = {}
    on_devices: dict[str, list[tuple[int, int | None]]] = {}
    for row in gpus.parse_csv(use):
        if len(row) > 3 and row[0].isdigit():
            percent = row[3].removesuffix("%").strip()
            share = int(percent) / 100 if percent.isdigit() else None
            devices[row[0]] = devices[row[1]] = share, _bytes(row[5:6])
            on_devices[row[0]] = on_devices[row[1]] = []
    processes: dict[int, list[DeviceUse]] = {}
    for row in gpus.parse_csv(users):
        if len(row) > 1 and row[0].isdigit():
            share, _ = devices.get(row[1], (None, None))  # not known for a part of a GPU (MIG)
            processes.setdefault(int(row[0]), []).append((share, _bytes(row[2:3])))
            on_devices.setdefault(row[1], []).append((int(row[0]), _bytes(row[2:3])))
    return GpuUse(f"{use.rstrip()}\n\n{users.rstrip()}\n", devices, processes, on_devices)


def _bytes(cells: list[str]) -> int | None:
    found = _MEBIBYTES.fullmatch("".join(cells))
    return int(found[1]) << 20 if found else None


def _run_tool(tool: str, *options: str) -> str:
    """Run nvidia-smi and return its output, or how it failed.

    The exit code is not checked: the agent may have reaped the program before this thread does.
    """
    try:
        done = gpus.run_nvidia_smi(tool, *options, "--format=csv", limit_s=NVIDIA_SMI_S_MAX)
    except HostError as err:
        return str(err)
    return (done.stdout + done.stderr)[:TEXT_CHARS_MAX]
