"""State of the GPUs that ranks use, from nvidia-smi: which are sick, and what else a person should know of them.

Rules: a GPU is sick only where nvidia-smi says so in words that are known here. Everything else says nothing: a value such as
`[N/A]`, a column that the driver does not know, an answer that is no table, no answer. A GPU that is not listed counts as lost when
it is not listed at a second look either: it may be in a reset, or its driver is being reloaded.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus, procfs
from orchestrator.core.observations import GpuState

NVIDIA_SMI_S_MAX = 5.0

SECOND_LOOK_S = 5.0
"""How long after a look at which a GPU was not listed the next one is."""

REMARKS_S = 600.0
"""A change from which nothing follows is reported at most this often: clocks may be lowered and raised all the time."""

COLUMNS = (
    "gpu_recovery_action", "remapped_rows.failure", "remapped_rows.pending", "ecc.errors.uncorrected.volatile.total",
    "fabric.state", "fabric.status", "clocks_event_reasons.active", "clocks_throttle_reasons.active",
)  # fmt: skip
"""What is asked of each GPU besides number, UUID and PCI address. The last one is the former name of the one before."""

LOST = "has left the bus"
_ACTIONS = {
    "reset": "wants a reset", "reboot": "wants a reboot of its host", "drain p2p": "wants its peer-to-peer traffic drained",
    "drain and reset": "wants to be drained and reset",
}  # fmt: skip
_ERRORS = {"[gpu is lost]": LOST, "[gpu requires reset]": "wants a reset"}
"""What a cell says instead of a value, and what that means."""

_NO_ROW = frozenset({"[gpu is lost]", "[unknown error]"})
"""A row that says this in all cells, also instead of its number, is none: its GPU is not listed."""

KERNEL_LOG, DRIVER = Path("/dev/kmsg"), Path("/proc/driver/nvidia/gpus")
"""The kernel's log, which not every user may read, and the driver's folder with a subfolder for each GPU, by its place on the bus."""

RECORD_BYTES_MAX = 8192
_XID = re.compile(rb"[^;]*;NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:]+)\): (?P<number>\d+)")

_NO_HANDLE = re.compile(
    r"Unable to determine the device handle for .*?(\b|GPU)([0-9A-F]{4}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-9A-F]):", re.I
)
"""What nvidia-smi says of a GPU that it cannot reach, instead of its row, or instead of all rows."""

_COUNT = re.compile(r"\d{1,18}", re.ASCII)
_HEX = re.compile(r"0x[0-9a-fA-F]{1,16}")
_SLOWDOWNS = {
    0x40: "it is too hot",
    0x80: "its power supply slows it down",
    0x20: "the driver keeps it from getting too hot",
}
"""Bits of the reasons for lower clocks that are faults; being idle or at the power limit is not one."""

REGISTERED = "Completed"
_FABRIC_FAILURES = ("Insufficient Resources", "Unknown Error")
_NO_FABRIC = ("Not Started", "In Progress")
"""State of a GPU that has registered with the NVLink fabric; what hosts have said as the status of such a registration that failed;
and states of one that takes no part, which is no news of a host on which it never did."""

_GPU_OF_LINKS = re.compile(r"^GPU \d+: .*\(UUID: (GPU-[^)\s]+)\)", re.M)
_LINK = re.compile(r"^\s*Link (\d+): (?:(<inactive>)|\d[\d.]* GB/s)", re.M)
"""What `nvidia-smi nvlink -s` says of a GPU, and of each of its links."""


class GpuStates:
    """States of the GPUs that ranks use. `ask` runs in a thread, all else in the agent's loop."""

    def __init__(self) -> None:
        # GPUs of ranks, as CUDA_VISIBLE_DEVICES names them: their numbers or their UUIDs
        self.devices: set[str] = set()
        self._columns: tuple[str, ...] = COLUMNS
        # By UUID: the number of each GPU that was ever listed, and its cells then
        self._numbers: dict[str, str] = {}
        self._first_rows: dict[str, dict[str, str]] = {}
        # Also by UUID: the NVLinks that were active at the first look (None: not looked yet), and what is to be said of them now
        self._links: dict[str, set[str]] | None = None
        self._link_remarks: dict[str, list[str]] = {}
        # By UUID too: the PCI address and the latest cells of each; and which were not listed at the last look
        self._buses: dict[str, str] = {}
        self._rows: dict[str, dict[str, str]] = {}
        self._gone: set[str] = set()
        self._latest: tuple[GpuState, ...] = ()
        self._reported: tuple[GpuState, ...] = ()
        self._reported_s = float("-inf")
        # The kernel's log, read from where it ended when ranks were first seen to use GPUs; the last Xid of each place on the bus
        self._log_fd: int | None = None
        self._xids: dict[str, str] = {}

    def take_news(self, now_s: float) -> tuple[GpuState, ...] | None:
        """Return the states of all GPUs of which there is something to say, if they are to be reported; None if not."""
        latest, is_due = self._latest, now_s >= self._reported_s + REMARKS_S
        has_other_faults = [gpu for gpu in latest if gpu.fault] != [gpu for gpu in self._reported if gpu.fault]
        if latest == self._reported or not (is_due or has_other_faults):
            return None
        self._reported, self._reported_s = latest, now_s
        return latest

    def ask(self, tool: str) -> None:
        """Ask nvidia-smi, if ranks use GPUs. What cannot be learned leaves the states as they are."""
        rows = self._query(tool) if self.devices else None
        if rows is None:
            return
        self._read_kernel_log()
        for uuid, cells in rows.items():
            self._first_rows.setdefault(uuid, cells)
        used = [uuid for uuid, number in self._numbers.items() if {uuid, number} & self.devices]
        gone = {uuid for uuid in used if uuid not in rows}
        if gone - self._gone:
            time.sleep(SECOND_LOOK_S)
            rows = self._query(tool)
            if rows is None:
                return
            gone -= rows.keys()
        self._gone = gone
        states = [self._state(uuid, None if uuid in gone else rows.get(uuid, {})) for uuid in used]
        self._latest = tuple(state for state in states if state.fault or state.remarks)
        if self._links is None or any(self._links.values()):
            self._ask_links(tool)

    def _ask_links(self, tool: str) -> None:
        """Note which of the NVLinks that were active are not now, for the next look: a fault is not to wait for this. Where there
        were none, they are not asked for again."""
        self._links = self._links or {}
        try:
            said = gpus.run_nvidia_smi(tool, "nvlink", "-s", limit_s=NVIDIA_SMI_S_MAX).stdout
        except HostError:
            return
        words = _GPU_OF_LINKS.split(said)[1:]
        for uuid, text in zip(words[::2], words[1::2], strict=True):
            links = dict(_LINK.findall(text))
            first = self._links.setdefault(uuid, {link for link, inactive in links.items() if not inactive})
            count = sum("all links are inActive" in text or bool(links.get(link)) for link in first)
            self._link_remarks[uuid] = [f"{count} of {len(first)} NVLinks have become inactive"] if count else []

    def _read_kernel_log(self) -> None:
        """Note the new Xids; without permission there are none, and a record that was overwritten is left out."""
        try:
            if self._log_fd is None:
                self._log_fd = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
                os.lseek(self._log_fd, 0, os.SEEK_END)
            while record := os.read(self._log_fd, RECORD_BYTES_MAX):  # one each time; BlockingIOError after the last
                if xid := _XID.match(record):
                    self._xids[xid["bus"].decode().lower()] = xid["number"].decode()
        except OSError:
            pass

    def _xid_text(self, uuid: str) -> str:
        """Return the last Xid of a GPU in parentheses; empty where there is none, or its place is not known."""
        for bus, number in self._xids.items():
            if any(uuid in procfs.read_text(file) for file in DRIVER.glob(f"{bus}.*/information")):
                return f" (Xid {number})"
        return ""

    def _query(self, tool: str) -> dict[str, dict[str, str]] | None:
        """Return the cells of each GPU by UUID and column, without columns that the driver does not know; None unless the
        whole answer is a table."""
        while self._columns:
            query = f"--query-gpu=index,uuid,pci.bus_id,{','.join(self._columns)}"
            try:
                done = gpus.run_nvidia_smi(tool, query, "--format=csv,noheader,nounits", limit_s=NVIDIA_SMI_S_MAX)
            except HostError:
                return None
            read = [row for row in gpus.parse_csv(done.stdout) if len(row) > 1]  # a line without a comma is a message
            table = [row for row in read if not set(map(str.lower, row)) <= _NO_ROW]
            has_rows = table or "[gpu is lost]" in done.stdout.lower()
            if has_rows and all(len(row) == len(self._columns) + 3 and row[0].isdigit() for row in table):
                rows = {self._identify(*row[:3]): dict(zip(self._columns, row[3:], strict=True)) for row in table}
                self._rows.update(rows)
                return rows
            lost = tuple(bus.upper() for _, bus in _NO_HANDLE.findall(done.stdout + done.stderr))
            if any(bus.endswith(lost) for bus in self._buses.values()):
                return {
                    uuid: cells for uuid, cells in self._rows.items() if not self._buses.get(uuid, "").endswith(lost)
                }
            unknown = [column for column in self._columns if f'"{column}"' in done.stdout + done.stderr]
            if not unknown:
                return None
            self._columns = tuple(column for column in self._columns if column not in unknown)
        return None

    def _identify(self, number: str, uuid: str, bus: str) -> str:
        """Return the UUID of a GPU, also of one that no longer gives it; numbers may shift when a GPU is gone."""
        if not uuid.startswith("GPU-"):
            return next((known for known, its_number in self._numbers.items() if its_number == number), uuid)
        self._numbers.setdefault(uuid, number)
        self._buses.setdefault(uuid, bus.upper())
        return uuid

    def _state(self, uuid: str, cells: dict[str, str] | None) -> GpuState:
        fault = LOST if cells is None else _fault(cells)
        number = self._numbers[uuid]
        before = next((gpu for gpu in self._latest if (gpu.gpu, gpu.fault) == (number, fault)), None)
        since = (
            before.since if before is not None else time.strftime("%H:%M:%S UTC", time.gmtime()) + self._xid_text(uuid)
        )
        return GpuState(number, fault, since if fault else "", self._remarks(uuid, cells or {}))

    def _remarks(self, uuid: str, cells: dict[str, str]) -> tuple[str, ...]:
        remarks = (
            ["a row of its memory is remapped at its next reset"] if _is_yes(cells, "remapped_rows.pending") else []
        )
        first = self._first_rows.get(uuid, {})
        if (more := _error_count(cells) - _error_count(first)) > 0:
            remarks.append(f"{more} uncorrected memory errors since the job began")
        state, status = cells.get("fabric.state", ""), cells.get("fabric.status", "")
        has_left = first.get("fabric.state") == REGISTERED and state in _NO_FABRIC
        fabric = status if state == REGISTERED and status in _FABRIC_FAILURES else state if has_left else ""
        remarks += [f"NVLink fabric: {fabric}"] if fabric else []
        clocks = cells.get(COLUMNS[-2]) or cells.get(COLUMNS[-1]) or ""
        reasons = int(clocks, 16) if _HEX.fullmatch(clocks) else 0
        return (
            *remarks,
            *self._link_remarks.get(uuid, []),
            *(f"lower clocks: {why}" for bit, why in _SLOWDOWNS.items() if reasons & bit),
        )


def _fault(cells: dict[str, str]) -> str:
    """Return what makes a GPU sick, as a phrase; empty for a GPU that is not."""
    told = next((_ERRORS[cell.lower()] for cell in cells.values() if cell.lower() in _ERRORS), "")
    wanted = _ACTIONS.get(cells.get("gpu_recovery_action", "").lower(), "")
    return (
        told or wanted or ("has failed to remap a row of its memory" if _is_yes(cells, "remapped_rows.failure") else "")
    )


def _error_count(cells: dict[str, str]) -> int:
    found = _COUNT.fullmatch(cells.get("ecc.errors.uncorrected.volatile.total", ""))
    return int(found[0]) if found else 0


def _is_yes(cells: dict[str, str], column: str) -> bool:
    return cells.get(column, "").lower() == "yes"
