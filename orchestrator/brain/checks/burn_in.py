"""Judgement of a burn-in: hosts whose products differ, and devices that are slow beside equal ones, or beside their own past.

A device is compared only with equal ones: other hardware, or another torch, has other speeds and rounds otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from orchestrator.brain.checks.finding import Finding, error, join_names, note, passed, warning
from orchestrator.core.host_facts import AllReduced

SLOW_SHARE = 0.1
DISK_SLOW_SHARE = 0.5
"""How far below the median a device is slow; disks are shared, and vary."""

DEVICES_MIN = 3
"""With fewer equal devices there is no median to compare with."""

_UNTRUSTED = "take it out of use, and have its processor, GPU and memory tested"
_SLOW_FIX = (
    "check cooling, power limit and clocks (nvidia-smi -q -d PERFORMANCE), and what else runs there, or leave it out"
)


def findings(results: Mapping[str, AllReduced], earlier: Mapping[str, tuple[str, AllReduced]]) -> Iterator[Finding]:
    """Yield a line for each host, then what is wrong. `earlier`: each host's last burn-in, with its date."""
    for name, result in results.items():
        parts = [f"{part} {min(speeds):.3g} {_unit(part)}" for part, speeds in result.speeds.items()]
        yield passed("burn-in", f"{name}: {' and '.join(dict.fromkeys(result.devices))}: {', '.join(parts)}", [name])
    for name, result in results.items():
        yield from (
            error("burn-in", [name], f"{text}: its results cannot be trusted", _UNTRUSTED) for text in result.wrong
        )
    yield from _sums({name: result for name, result in results.items() if not result.wrong})
    yield from _slow(results)
    for name, (date, before) in earlier.items():
        yield from _slower_than_before(name, results[name], before, date)


def _unit(part: str) -> str:
    return "TFLOP/s" if "float" in part else "GB/s"


def _limit(part: str) -> float:
    return 1 - (DISK_SLOW_SHARE if part == "disk" else SLOW_SHARE)


def _sums(results: Mapping[str, AllReduced]) -> Iterator[Finding]:
    by_kind: dict[tuple[object, str], dict[tuple[str, ...], list[str]]] = {}
    for name, result in results.items():
        for kind, sums in result.sums.items():
            by_kind.setdefault((frozenset(result.devices), kind), {}).setdefault(sums, []).append(name)
    for (_, kind), groups in by_kind.items():
        usual, *others = sorted(groups.values(), key=len, reverse=True)
        if others and len(others[0]) == len(usual):
            names = [name for group in groups.values() for name in group]
            text = f"{join_names(names)}: their {kind} products of the same matrices have different checksums, and it is not known whose is right"
            yield error("burn-in", names, text, _UNTRUSTED)
            continue
        for name in (name for group in others for name in group):
            text = f"its {kind} product of the same matrices has another checksum than the other {len(usual)}: its results cannot be trusted"
            yield error("burn-in", [name], text, _UNTRUSTED)


def _slow(results: Mapping[str, AllReduced]) -> Iterator[Finding]:
    equal: dict[tuple[str, str], list[tuple[str, int, float]]] = {}
    for name, result in results.items():
        for part, speeds in result.speeds.items():
            for index, (device, speed) in enumerate(zip(result.devices, speeds)):
                equal.setdefault((device, part), []).append((name, index, speed))
    alone = {name for devices in equal.values() if len(devices) < DEVICES_MIN for name, *_ in devices}
    for (_, part), devices in equal.items():
        median = statistics.median(speed for *_, speed in devices)
        for name, index, speed in devices:
            if len(devices) >= DEVICES_MIN and speed < median * _limit(part):
                which = f"GPU {index}: " if len(results[name].devices) > 1 and part != "disk" else ""
                text = f"{which}{part} is {1 - speed / median:.0%} below the median of {len(devices)} equal ones ({speed:.3g} beside {median:.3g} {_unit(part)})"
                yield warning("burn-in", [name], text, _SLOW_FIX)
    if alone:
        yield note("burn-in", sorted(alone), "not compared in all parts: fewer than 3 are equal")


def _slower_than_before(name: str, now: AllReduced, before: AllReduced, date: str) -> Iterator[Finding]:
    for part, (old,) in before.speeds.items():
        speed = min(now.speeds.get(part, (old,)))
        if now.devices == before.devices and speed < old * _limit(part):
            text = f"{part} is {1 - speed / old:.0%} slower than on {date} ({speed:.3g} beside {old:.3g} {_unit(part)})"
            yield warning("burn-in", [name], text, _SLOW_FIX)
