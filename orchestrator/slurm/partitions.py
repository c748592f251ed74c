"""Would a job ever start in its partition? What `scontrol show partition` says, held against what is asked for. Pure.

With EnforcePartLimits=NO, Slurm's default, sbatch takes a job beyond these limits, estimates a start, and lets it wait
for ever. A QOS may allow more than its partition: with one, sizes are not judged here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FIELD = re.compile(r"(?:^|\s)(PartitionName|Default|State|TotalNodes|MaxNodes|MinNodes|MaxTime)=(\S*)")
_UNITS_S = (1, 60, 3600)


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition as Slurm tells of it; None is no limit."""

    name: str
    is_default: bool
    state: str
    nodes: int
    nodes_min: int
    nodes_max: int | None
    limit_s_max: float | None

    @property
    def size(self) -> str:
        """Return its limits in words."""
        each = f", {self.nodes_max} of them for a job" if self.nodes_max is not None else ""
        limit = f"at most {clock(self.limit_s_max)}" if self.limit_s_max is not None else "no time limit"
        return f"{self.name}: {self.nodes} node{'s' if self.nodes != 1 else ''}{each}, {limit}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a job asks of its partition. `partitions`: any of them will do; empty is the default one."""

    partitions: tuple[str, ...]
    nodes: int
    limit_s: float | None
    has_qos: bool


def read(text: str) -> tuple[Partition, ...]:
    """Read what `scontrol -a -o show partition` prints, a line for each partition."""
    found = [dict(_FIELD.findall(line)) for line in text.splitlines()]
    return tuple(_partition(one) for one in found if "PartitionName" in one)


def wanted(asked: Asked, there: Sequence[Partition]) -> tuple[Partition, ...]:
    """Return the partitions that a job may start in."""
    return tuple(
        one for one in there if (one.name in asked.partitions if asked.partitions else one.is_default)
    )


def fault(asked: Asked, one: Partition) -> tuple[str, str]:
    """Return what keeps a job from ever starting in a partition, and the field of the spec that this is about; two
    empty texts when nothing does."""
    if one.state not in ("UP", ""):
        return f"partition {one.name} is {one.state}", "slurm.partition"
    if asked.has_qos:
        return "", ""
    most = one.nodes if one.nodes_max is None else min(one.nodes, one.nodes_max)
    if asked.nodes > most:
        return f"{asked.nodes} nodes asked, and a job in partition {one.name} gets {most} at most", "nodes"
    if asked.nodes < one.nodes_min:
        return f"{asked.nodes} nodes asked, and a job in {one.name} needs {one.nodes_min} at least", "nodes"
    if asked.limit_s is not None and one.limit_s_max is not None and asked.limit_s > one.limit_s_max:
        limit = f"partition {one.name} allows {clock(one.limit_s_max)} at most"
        return f"{clock(asked.limit_s)} asked, and {limit}", "time_limit"
    return "", ""


def clock(seconds: float) -> str:
    """Return a time as a job file has it: `2d`, `1h30m`."""
    minutes = int(seconds // 60)
    parts = ((minutes // 1440, "d"), (minutes // 60 % 24, "h"), (minutes % 60, "m"))
    return "".join(f"{count}{unit}" for count, unit in parts if count) or "0m"


def _partition(found: dict[str, str]) -> Partition:
    return Partition(
        name=found["PartitionName"],
        is_default=found.get("Default") == "YES",
        state=found.get("State", ""),
        nodes=_number(found.get("TotalNodes", "")) or 0,
        nodes_min=_number(found.get("MinNodes", "")) or 0,
        nodes_max=_number(found.get("MaxNodes", "")),
        limit_s_max=_seconds(found.get("MaxTime", "")),
    )


def _number(word: str) -> int | None:
    return int(word) if word.isdigit() else None


def _seconds(word: str) -> float | None:
    """Return a time as Slurm prints it: `1-02:00:00`, `02:00:00`, `30:00`; None for UNLIMITED."""
    days, _, rest = word.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (*parts, days or "0")):
        return None
    return int(days or 0) * 86400.0 + sum(
        int(part) * unit for part, unit in zip(reversed(parts), _UNITS_S, strict=False)
    )
