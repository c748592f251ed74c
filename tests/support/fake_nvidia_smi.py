"""What nvidia-smi prints, and what it ends with, as drivers do: `answer`, on hosts that are healthy, sick, old or strange.

The forms are those that people have reported: rows without a value say why in brackets, one field that is not known is
named and the program ends with 2, a GPU without a handle has a line of its own before the rows of the others, and a
damaged infoROM makes the program end with 14 although all is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

NEW = 580
CORRUPTED_INFOROM = 14

SINCE = {
    "clocks_throttle_reasons": 361, "remapped_rows": 450, "clocks_event_reasons": 535, "gpu_recovery_action": 565,
    "fabric": 535,
}  # fmt: skip
"""The first driver that knows the fields which begin so; all others are old. Former names stay known."""

UNITS = {
    "utilization.gpu": "%",
    "utilization.memory": "%",
    "memory.used": "MiB",
    "memory.total": "MiB",
    "power.draw": "W",
}

HEALTHY = {
    "name": "NVIDIA H100 80GB HBM3", "memory.total": "81559", "memory.used": "512", "utilization.gpu": "97",
    "utilization.memory": "41", "power.draw": "612.40", "pstate": "P0", "gpu_recovery_action": "None",
    "remapped_rows.failure": "No", "remapped_rows.pending": "No", "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.corrected.volatile.total": "0", "clocks_event_reasons.active": "0x0000000000000000",
    "clocks_throttle_reasons.active": "0x0000000000000000", "fabric.state": "Completed", "fabric.status": "Success",
    "NVLinks": "AAAAAAAAAAAAAAAAAA",
}  # fmt: skip
"""The cells of a GPU that trains; the reasons for lower clocks that are asked one by one are `Not Active`. `NVLinks`, which is no
column: a letter for each link, `A` if it is active and `I` if not; empty for a GPU without any; another text is printed as it is."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. `cells`: what is unlike a healthy one; `handle`: why there is no handle of it; `is_listed`: it has a row, or that line;
    `error`: what its row says in each cell, also instead of its number, behind that line if there is one."""

    cells: Mapping[str, str] = field(default_factory=dict)
    handle: str = ""
    is_listed: bool = True
    error: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """A host with GPUs 0 and 1. `warning`: a line before its answers; `text`: what it prints instead of any answer; `hangs`: it
    never answers; `users`: pid, GPU and MiB of each process that computes."""

    driver: int = NEW
    cards: tuple[Card, ...] = (Card(), Card())
    warning: str = ""
    text: str | None = None
    code: int = 0
    hangs: bool = False
    users: tuple[tuple[int, int, int], ...] = ()


def sick(cells: Mapping[str, str], driver: int = NEW) -> Host:
    """Return a host whose GPU 1 has these cells."""
    return Host(driver, (Card(), Card(cells)))


def clocks(bits: int, driver: int = NEW) -> Host:
    """Return a host whose GPU 1 has lower clocks, for these reasons."""
    mask = f"0x{bits:016x}"
    return sick({"clocks_event_reasons.active": mask, "clocks_throttle_reasons.active": mask}, driver)


def every_cell(text: str, driver: int = NEW) -> Host:
    """Return a host whose GPU 1 has this in each cell but its name."""
    return Host(driver, (Card(), Card({column: text for column in HEALTHY if column != "name"})))


def without_handle(why: str) -> Host:
    return Host(cards=(Card(), Card(handle=why)))


LOST_ROW = Host(cards=(Card(), Card(error="[GPU is lost]")))
LOST_LINE_AND_ROW = Host(cards=(Card(), Card(handle="Unknown Error", error="[Unknown Error]")), code=255)
UNLISTED = Host(cards=(Card(), Card(is_listed=False)))
NO_DEVICES = Host(text="No devices were found\n", code=6)
NO_DRIVER = Host(
    text="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n",
    code=9,
)
MISMATCH = Host(
    text="Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.82\n", code=18
)
ALL_WITHOUT_HANDLE = Host(
    text="Unable to determine the device handle for GPU 0000:19:00.0: GPU is lost.  Reboot the system to recover this GPU\n",
    code=15,
)
CORRUPTED = Host(warning="WARNING: infoROM is corrupted at gpu 0000:19:00.0\n", code=CORRUPTED_INFOROM)
SPANISH = Host(text="NVIDIA-SMI ha fallado porque no pudo comunicarse con el controlador de NVIDIA.\n", code=9)
HANGS = Host(hangs=True)


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-79ee-1016-8ea3-c1fff3f1c1d2"


def bus(number: int) -> str:
    """Return a place on the bus as in the kernel's log and in lines without a row; columns have a longer domain."""
    return f"0000:1{8 + number}:00.0"


def answer(host: Host, *options: str) -> tuple[str, int] | None:
    """Return what nvidia-smi prints and its exit code; None if it never ends."""
    if host.hangs:
        return None
    if host.text is not None:
        return host.text, host.code
    words = dict(word.partition("=")[::2] for word in options)
    lines: list[str] = []
    if "-L" in words:
        lines = [
            f"GPU {number}: {HEALTHY['name']} (UUID: {uuid(number)})"
            for number, card in enumerate(host.cards)
            if card.is_listed and not card.handle and not card.error
        ]
    elif "--query-gpu" in words:
        columns = words["--query-gpu"].split(",")
        if unknown := [column for column in columns if SINCE.get(column.partition(".")[0], 0) > host.driver]:
            return f'Field "{unknown[0]}" is not a valid field to query.\n\n', 2
        lines = _table(host, columns, words["--format"])
    elif "nvlink" in words:
        lines = _links(host)
    elif "--query-compute-apps" in words:
        form = words["--format"]
        lines = [] if "noheader" in form else ["pid, gpu_uuid, used_gpu_memory [MiB]"]
        unit = "" if "nounits" in form else " MiB"
        lines += [f"{pid}, {uuid(number)}, {size_mib}{unit}" for pid, number, size_mib in host.users]
    return host.warning + "".join(f"{line}\n" for line in lines), host.code


def _table(host: Host, columns: list[str], form: str) -> list[str]:
    units = {} if "nounits" in form else UNITS
    lines = (
        [] if "noheader" in form else [", ".join(f"{one} [{units[one]}]" if one in units else one for one in columns)]
    )
    for number, card in enumerate(host.cards):
        known = {
            "index": str(number), "uuid": uuid(number), "pci.bus_id": f"0000{bus(number)}",
            "driver_version": f"{host.driver}.82.07", **HEALTHY, **card.cells,
        }  # fmt: skip
        if card.handle:
            which = bus(number) if card.error else f"{number}: {bus(number)}"
            lines.append(f"Unable to determine the device handle for GPU{which}: {card.handle}")
        if card.error:
            lines.append(", ".join(card.error for _ in columns))
        elif card.is_listed and not card.handle:
            cells = [(known.get(column, "Not Active"), units.get(column, "")) for column in columns]
            lines.append(", ".join(f"{cell} {unit}" if unit and cell[:1].isdigit() else cell for cell, unit in cells))
    return lines


def _links(host: Host) -> list[str]:
    lines = []
    for number, card in enumerate(host.cards):
        links = card.cells.get("NVLinks", HEALTHY["NVLinks"])
        if card.is_listed and not card.handle and not card.error:
            lines.append(f"GPU {number}: {HEALTHY['name']} (UUID: {uuid(number)})")
            if links and not set(links) - set("I"):
                lines.append("NVML: Unable to retrieve NVLink information as all links are inActive")
            elif set(links) <= set("AI"):
                says = {"A": "26.562 GB/s", "I": "<inactive>"}
                lines += [f"\t Link {link}: {says[letter]}" for link, letter in enumerate(links)]
            else:
                lines.append(links)
    return lines


def run(host: Host, tool: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Return what running it gives; raises TimeoutExpired where it never ends."""
    answered = answer(host, *options)
    if answered is None:
        raise subprocess.TimeoutExpired([tool, *options], 5.0)
    return subprocess.CompletedProcess([tool, *options], answered[1], answered[0], "")


def install(folder: Path, host: Host) -> Path:
    """Write a program nvidia-smi that answers as on this host, and return it; `host_file` beside it may be changed."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    root = Path(__file__).parents[2]
    program.write_text(
        f"#!{sys.executable} -S\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        f"from tests.support import fake_nvidia_smi\nfake_nvidia_smi.main({str(host_file(folder))!r})\n"
    )
    program.chmod(0o755)
    write(folder, host)
    return program


def host_file(folder: Path) -> Path:
    return folder / "host.json"


def write(folder: Path, host: Host) -> None:
    """Change the host of an installed program, at once for whoever runs it."""
    names = ("driver", "warning", "text", "code", "hangs", "users")
    fields = {name: getattr(host, name) for name in names}
    fields["cards"] = [[dict(card.cells), card.handle, card.is_listed, card.error] for card in host.cards]
    partial = host_file(folder).with_suffix(".part")
    partial.write_text(json.dumps(fields))
    partial.rename(host_file(folder))


def main(file: str) -> None:
    """Answer as the host in a file."""
    fields = json.loads(Path(file).read_text())
    host = replace(Host(), **{**fields, "cards": tuple(Card(*card) for card in fields["cards"])})
    answered = answer(host, *sys.argv[1:])
    while answered is None:
        time.sleep(3600)
    sys.stdout.write(answered[0])
    sys.exit(answered[1])
