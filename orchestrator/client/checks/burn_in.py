"""Burn-in of all hosts at once, in rounds, the speed of all-reduces between them, and what is remembered for each host."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from orchestrator.brain.checks import burn_in as judgement
from orchestrator.brain.checks.finding import Finding, join_names, note, warning
from orchestrator.client.checks import cluster
from orchestrator.core.host import host_health
from orchestrator.core.host.host_health import HostHealth
from orchestrator.core.host_facts import AllReduced
from orchestrator.core.wire.bootstrap import AllReduce

ROUND_S_MAX = 60.0
"""A host whose check has gone computes on for at most this long, and what its last round needs."""

ROUND_S_MIN = 5.0
ROUND_EXTRA_S_MAX = 240.0
REDUCE_S = 2.0
_FIX = "read the reason, then check again"


def check(
    ask: cluster.AskReduces, questions: cluster.CheckRequest, report: cluster.ClusterReport,
    burn_s: float, home: Path, say: Callable[[str], None],
) -> Iterator[Finding]:  # fmt: skip
    """Burn in all usable hosts at once, then measure all-reduces between those that could be."""
    usable = [name for name in report.facts if name not in report.unusable()]
    steps = {
        name: AllReduce(
            0, 0, "", 0, questions.programs[name], questions.env,
            bool(questions.job.gpus_each and report.facts[name].gpus), folder=questions.folders[0],
        )
        for name in usable if questions.programs[name]
    }  # fmt: skip
    if others := [name for name in usable if name not in steps]:
        yield note("burn-in", others, "no burn-in: the ranks' Python is in the code snapshot")
    results = yield from burn_in(ask, steps, burn_s, home, say)
    reduces = {name: report.reduces[name] for name in steps if name in report.reduces}
    yield from judgement.judge_reduces((yield from _measure_reduces(ask, reduces)), results)


def burn_in(
    ask: cluster.AskReduces, steps: dict[str, AllReduce], burn_s: float, home: Path, say: Callable[[str], None]
) -> Generator[Finding, None, dict[str, AllReduced]]:
    """Burn all hosts in for so long, judge them, and remember their speeds; return what came of it.

    A host that cannot be burned in loses its step."""
    rounds: dict[str, list[AllReduced]] = {}
    began_s = time.monotonic()
    while steps and (left_s := began_s + burn_s - time.monotonic()) > (ROUND_S_MIN if rounds else 0):
        say(f"burn-in: {burn_s - left_s:.0f} of {burn_s:.0f} s")
        asked = {
            name: replace(step, burn_s=min(left_s, ROUND_S_MAX), rank=len(rounds.get(name, ())))
            for name, step in steps.items()
        }
        for name, answer in cluster.ask_reduces(ask, asked, min(left_s, ROUND_S_MAX) + ROUND_EXTRA_S_MAX).items():
            if not answer.fault:
                rounds.setdefault(name, []).append(answer)
                continue
            del steps[name]
            after = f" after round {len(rounds[name])}" if name in rounds else ""
            yield warning("burn-in", [name], f"{name}: no burn-in{after}: {answer.fault}", _FIX)
    results = {name: _merge(answers) for name, answers in rounds.items()}
    known = {name: one for name, one in host_health.read_all(home).items() if name in results and one.burned_at}
    earlier = {
        name: (time.strftime("%Y-%m-%d", time.gmtime(one.burned_at)), AllReduced("", one.devices, {part: (speed,) for part, speed in one.speeds.items()}))
        for name, one in known.items()
    }  # fmt: skip
    judged = list(judgement.findings(results, earlier))
    yield from judged
    for name, result in results.items():
        about = [one for one in judged if one.nodes == (name,) and one.fix]
        fault = next((f"burn-in: {one.found}" for one in about if not one.ok), "")
        is_unusual = about or result.busy > judgement.BUSY_SHARE_MAX
        if is_unusual and not fault and name in known and not known[name].burn_fault:
            continue  # what is usual stays known
        now_s, speeds = time.time(), {part: min(filter(None, row), default=0.0) for part, row in result.speeds.items()}
        host = HostHealth(name, now_s, "", burned_at=now_s, burn_fault=fault, devices=result.devices, speeds=speeds)
        with contextlib.suppress(OSError):  # the burn-in is valid without it
            host_health.write(home, host)
    return results


def _merge(rounds: list[AllReduced]) -> AllReduced:
    """Return the rounds of a host as one: the median of each speed."""
    devices = range(len(rounds[0].devices))
    speeds = {
        part: tuple(
            statistics.median(
                [speed for one in rounds for speed in one.speeds.get(part, ())[at : at + 1] if speed] or [0.0]
            )
            for at in devices
        )
        for part in rounds[0].speeds
    }
    sums = {kind: tuple(sorted({text for one in rounds for text in one.sums.get(kind, ())})) for kind in rounds[0].sums}
    wrong, notes = (
        tuple(dict.fromkeys(text for texts in column for text in texts))
        for column in ([one.wrong for one in rounds], [one.notes for one in rounds])
    )
    busy = statistics.median(one.busy for one in rounds)
    return replace(rounds[0], speeds=speeds, sums=sums, wrong=wrong, notes=notes, busy=busy)


def _measure_reduces(
    ask: cluster.AskReduces, steps: Mapping[str, AllReduce]
) -> Generator[Finding, None, dict[tuple[str, ...], float]]:
    """Measure the all-reduce of each two neighbours in a ring of hosts, twice, and the one of all of them."""
    names = list(steps)
    if len(names) < 2:
        yield note("burn-in", (), "no all-reduce was measured: it takes two hosts that have passed the check")
        return {}
    pairs: list[tuple[str, ...]] = [(names[at - 1], name) for at, name in enumerate(names) if at or len(names) > 2]
    even = len(pairs) // 2 * 2
    rounds: list[list[tuple[str, ...]]] = [group for group in (pairs[:even:2], pairs[1:even:2], pairs[even:]) if group]
    speeds: dict[tuple[str, ...], float] = {}
    failed: dict[tuple[str, ...], str] = {}
    for groups in (*rounds, *rounds, [tuple(names)]):
        asked = [cluster.group_steps(steps, group) for group in groups]
        burned = {name: replace(step, burn_s=REDUCE_S) for group in asked for name, step in group.items()}
        answers = cluster.ask_reduces(ask, burned)
        for group in groups:
            faults = [answers[name].fault for name in group if answers[name].fault]
            if faults:
                failed[group] = faults[0]
            else:
                speed = min(answers[name].speeds["all-reduce"][0] for name in group)
                speeds[group] = max(speed, speeds.get(group, 0.0))
    for group in failed.keys() - speeds.keys():
        text = f"the all-reduce of {join_names(group)} was not measured: {failed[group]}"
        yield warning("burn-in", group, text, _FIX)
    return speeds
