"""Judgement of a burn-in: hosts whose products differ, and devices that are slow beside equal ones, or beside their own past.

A device is compared only with equal ones: other hardware, or another torch, has other speeds and rounds otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.brain.checks.finding import Finding, error, join_names, note, passed, warning
from orchestrator.core.host_facts import AllReduced

SLOW_SHARE = 0.1
SLOW_SHARES = {"disk": 0.5, "all-reduce": 0.3}
"""How far below the median a part is slow; disks and networks are shared, and vary."""

EQUALS_MIN = 3
"""With fewer equal devices there is no median to compare with."""

BUSY_SHARE_MAX = 0.03
"""How much of the processors others may use while their speed is measured."""

_UNTRUSTED = ": its results cannot be trusted"
_TEST_FIX = "take it out of use, and have its processor, GPU and memory tested"
_SLOW_FIX = (
    "check cooling, power limit and clocks (nvidia-smi -q -d PERFORMANCE), and what else runs there, or leave it out"
)

_LINK_FIX = "check cable, switch port, and which network the ranks use (rendezvous.interface, NCCL_IB_HCA)"


def findings(results: Mapping[str, AllReduced], earlier: Mapping[str, tuple[str, AllReduced]]) -> Iterator[Finding]:
    """Yield a line for each host, then what is wrong. `earlier`: each host's last burn-in, with its date."""
    for name, result in results.items():
        figures = {part: min(filter(None, row)) for part, row in result.speeds.items() if any(row)}
        words = ", ".join(f"{part} {speed:.3g} {_unit(part)}" for part, speed in figures.items())
        text = f"{name}: {' and '.join(dict.fromkeys(result.devices))}: {words or 'too short for a speed'}"
        yield passed("burn-in", text, [name], figures)
        yield from (error("burn-in", [name], f"{text}{_UNTRUSTED}", _TEST_FIX) for text in result.wrong)
        yield from (warning("burn-in", [name], text, "read the reason, then check again") for text in result.notes)
        if result.busy > BUSY_SHARE_MAX:
            text = f"other processes used {result.busy:.0%} of its processors, so its speed is not judged"
            yield note("burn-in", [name], text)
    yield from _sums({name: result for name, result in results.items() if not result.wrong})
    rows: dict[tuple[str, str], list[tuple[str, str, float]]] = {}
    for name, result in results.items():
        for part, row in result.speeds.items() if result.busy <= BUSY_SHARE_MAX else ():
            for at, (device, speed) in enumerate(zip(result.devices, row)):  # noqa: B905
                which = f"GPU {at}: " if len(result.devices) > 1 else ""
                rows.setdefault((device, part), []).extend([(name, f"{which}{part}", speed)] if speed else [])
            date, before = earlier.get(name, ("", result))
            usual = (
                min(filter(None, before.speeds.get(part, ())), default=0.0) if before.devices == result.devices else 0.0
            )
            yield from _slow([name], part, min(filter(None, row), default=0.0), usual, f"than on {date}", _SLOW_FIX)
    for (_, part), equal in rows.items():
        usual = statistics.median(speed for *_, speed in equal) if len(equal) >= EQUALS_MIN else 0.0
        beside = f"than the median of {len(equal)} equal ones"
        for name, which, speed in equal:
            yield from _slow([name], part, speed, usual, beside, _SLOW_FIX, which)
    few = {name for equal in rows.values() if len(equal) < EQUALS_MIN for name, *_ in equal}
    if few and len(results) > 1:
        yield note("burn-in", sorted(few), f"not compared in all parts: fewer than {EQUALS_MIN} are equal")


def _unit(part: str) -> str:
    return "TFLOP/s" if "float" in part else "GB/s"


def _slow(
    names: Sequence[str], part: str, speed: float, usual: float, beside: str, fix: str, label: str = ""
) -> Iterator[Finding]:
    """Yield a finding if a speed is known and too far below what is usual. `label`: the part as it is shown."""
    if 0 < speed < usual * (1 - SLOW_SHARES.get(part, SLOW_SHARE)):
        text = (
            f"{label or part} is {1 - speed / usual:.0%} slower {beside} ({speed:.3g} beside {usual:.3g} {_unit(part)})"
        )
        yield warning("burn-in", names, text, fix)


def _sums(results: Mapping[str, AllReduced]) -> Iterator[Finding]:
    """Yield the hosts whose checksums differ from those of most; where there is no such majority, all of them."""
    by_kind: dict[tuple[object, str], dict[tuple[str, ...], list[str]]] = {}
    for name, result in results.items():
        for kind, sums in result.sums.items():
            by_kind.setdefault((frozenset(result.devices), kind), {}).setdefault(sums, []).append(name)
    for (_, kind), groups in by_kind.items():
        usual, *others = sorted(groups.values(), key=len, reverse=True)
        if others and len(others[0]) == len(usual):
            names = [name for group in groups.values() for name in group]
            text = f"{join_names(names)}: their {kind} products of the same matrices have different checksums, and it is not known whose is right"
            yield error("burn-in", names, text, _TEST_FIX)
            continue
        for name in (name for group in others for name in group):
            text = (
                f"its {kind} product of the same matrices has another checksum than the other {len(usual)}{_UNTRUSTED}"
            )
            yield error("burn-in", [name], text, _TEST_FIX)


def judge_reduces(speeds: Mapping[tuple[str, ...], float], results: Mapping[str, AllReduced]) -> Iterator[Finding]:
    """Yield the speeds of the all-reduces of pairs and of all hosts, and what is slow: a host whose best pair is, or a pair."""
    pairs = {group: speed for group, speed in speeds.items() if len(group) == 2}
    slowest = min(pairs.values(), default=0.0)
    for group in [group for group, speed in speeds.items() if len(group) > 2 or speed == slowest]:
        which = join_names(group) if len(group) == 2 else f"all {len(group)} hosts"
        which += f", the slowest of {len(pairs)} pairs" if len(group) == 2 and len(pairs) > 1 else ""
        found = f"all-reduce of {which}: {speeds[group]:.3g} GB/s"
        yield passed("burn-in", found, group if len(group) == 2 else (), {"all-reduce": speeds[group]})
    quiet = {pair: speed for pair, speed in pairs.items() if all(results[name].busy <= BUSY_SHARE_MAX for name in pair)}
    best = {name: max(speed for pair, speed in quiet.items() if name in pair) for pair in quiet for name in pair}
    usual = statistics.median(best.values()) if len(best) >= EQUALS_MIN else 0.0
    slow = [
        one
        for name, speed in best.items()
        for one in _slow(
            [name], "all-reduce", speed, usual, "than the median", _LINK_FIX, "all-reduce with each neighbour"
        )
    ]
    yield from slow
    hosts = {name for one in slow for name in one.nodes}
    for pair, speed in quiet.items():
        yield from _slow(pair, "all-reduce", speed, usual if not hosts & {*pair} else 0.0, "than the median", _LINK_FIX)
