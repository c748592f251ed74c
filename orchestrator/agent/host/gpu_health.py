"""GPUs of this node by nvidia-smi: models, driver, ECC errors, lowered clocks, and who uses their memory; Xids from the kernel."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence

from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus, procfs
from orchestrator.core.host_facts import UNKNOWN, GpuFacts, GpuUser

NVIDIA_SMI_S_MAX = 15.0
DMESG_S_MAX = 5.0
DCGMI_S_MAX = 60.0
XIDS_MAX = 5
COMMAND_CHARS_MAX = 100

_BASICS = ("index", "uuid", "name", "driver_version", "memory.total", "ecc.errors.uncorrected.volatile.total")
_SLOWDOWNS = {
    "clocks_throttle_reasons.hw_thermal_slowdown": "it is too hot",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "its power supply slows it down",
    "clocks_throttle_reasons.sw_thermal_slowdown": "the driver keeps it from getting too hot",
}
"""Reasons for lower clocks that are faults; being idle or at the power limit is not one."""


class GpuHealth:
    """State of the GPUs by nvidia-smi and the kernel; empty where there is no nvidia-smi."""

    def __init__(self) -> None:
        self.gpus: tuple[GpuFacts, ...] = ()
        self.users: tuple[GpuUser, ...] = ()
        self.fault = ""
        self.xids: tuple[str, ...] = ()


def read() -> GpuHealth:
    """Ask nvidia-smi and the kernel's log, each within its limit."""
    health, tool = GpuHealth(), gpus.find_nvidia_smi()
    if tool is None:
        return health
    try:
        table = _query(tool, "gpu", (*_BASICS, *_SLOWDOWNS)) or _query(tool, "gpu", _BASICS)
        if not table:
            health.fault = f"`{tool} --query-gpu` fails: {_last_output(tool)}"
            return health
        health.gpus = tuple(_gpu(row) for row in table if len(row) >= len(_BASICS))
        apps = _query(tool, "compute-apps", ("pid", "gpu_uuid", "used_memory"))
    except HostError as err:
        health.fault = str(err)
        return health
    health.users = tuple(_user(row) for row in apps if len(row) == 3 and row[0].isdigit())
    health.xids = _xids()
    return health


def _query(tool: str, what: str, fields: Sequence[str]) -> list[list[str]]:
    """Return a table of nvidia-smi, empty when it refuses: an older driver does not know every field."""
    options = (f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")
    done = gpus.run_nvidia_smi(tool, *options, limit_s=NVIDIA_SMI_S_MAX)
    return gpus.parse_csv(done.stdout) if done.returncode in gpus.GOOD_CODES else []


def _last_output(tool: str) -> str:
    done = gpus.run_nvidia_smi(tool, "-L", limit_s=NVIDIA_SMI_S_MAX)
    return gpus.output_line(done) or f"code {done.returncode}"


def _gpu(row: Sequence[str]) -> GpuFacts:
    index, uuid, model, driver, memory, ecc = row[: len(_BASICS)]
    active = zip(_SLOWDOWNS.values(), row[len(_BASICS) :], strict=False)
    slowdowns = tuple(why for why, state in active if state == "Active")
    return GpuFacts(index, uuid, model, driver, _number(memory), _number(ecc), slowdowns)


def _user(row: Sequence[str]) -> GpuUser:
    pid = int(row[0])
    command = procfs.read_text(procfs.PROC / str(pid) / "cmdline").replace("\0", " ").strip()
    return GpuUser(pid, row[1], _number(row[2]), command[:COMMAND_CHARS_MAX])


def _number(text: str) -> int:
    """Return a number of nvidia-smi; UNKNOWN for `[N/A]`."""
    return int(text) if text.isdigit() else UNKNOWN


def _xids() -> tuple[str, ...]:
    """Return the last Xid lines of the kernel's log, where this user may read it."""
    try:
        done = subprocess.run(
            ["dmesg"], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
            timeout=DMESG_S_MAX, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = [line.strip()[:200] for line in done.stdout.splitlines() if "NVRM: Xid" in line]
    return tuple(found[-XIDS_MAX:])


def failed_diagnoses() -> tuple[str, ...]:
    """Return the short tests of NVIDIA's DCGM that fail, where it is installed; what it prints differs by version."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError, AttributeError):
        done = subprocess.run(
            ["dcgmi", "diag", "-r", "1", "-j"], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
            errors="replace", timeout=DCGMI_S_MAX, check=False,
        )  # fmt: skip
        parts = [part for part in json.loads(done.stdout).values() if isinstance(part, dict)]
        tests = [test for part in parts for group in part.get("test_categories", ()) for test in group["tests"]]
        return tuple(
            f"dcgmi diag: its test {test['name']} fails"
            for test in tests
            if '"status": "fail"' in json.dumps(test).lower()
        )
    return ()
