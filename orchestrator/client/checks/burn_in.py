"""Burn-in of all hosts at once, in rounds, and what is remembered of it for each host."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.backends.api import LaunchError
from orchestrator.brain.checks import burn_in as judgement
from orchestrator.brain.checks.finding import Finding, Severity, describe, warning
from orchestrator.client.checks.cluster import CheckRequest, ClusterReport
from orchestrator.core.host import host_health
from orchestrator.core.host.host_health import HostHealth
from orchestrator.core.host_facts import AllReduced
from orchestrator.core.wire.bootstrap import AllReduce

ROUND_S_MAX = 60.0
"""A host whose check has gone computes on for at most this long, and what its last round needs."""

ROUND_S_MIN = 5.0
ROUND_EXTRA_S_MAX = 200.0
_FIX = "read the reason, then check again"


def plan_steps(questions: CheckRequest, report: ClusterReport, folder: str) -> dict[str, AllReduce]:
    """Return the step of each usable host that has torch, and whose GPUs nobody uses; add a finding for each other one."""
    steps: dict[str, AllReduce] = {}
    for name, facts in report.facts.items():
        on_gpu = bool(questions.job.gpus_each and facts.gpus)
        if name in report.unusable():
            continue
        if not facts.program or not facts.program.torch:
            report.findings.append(
                warning("burn-in", [name], "no burn-in: it has no torch that orch knows", "name it in python:")
            )
        elif on_gpu and (name in questions.gpus_held or facts.gpu_users):
            text, fix = "no burn-in: its GPUs are in use", "wait until they are free"
            report.findings.append(warning("burn-in", [name], text, fix))
        else:
            steps[name] = AllReduce(0, 1, "", 0, questions.programs[name], questions.env, on_gpu, folder=folder)
    return steps


def burn_in(
    ask: Callable[[Mapping[str, Any], type[AllReduced], float], Mapping[str, AllReduced | LaunchError]],
    steps: Mapping[str, AllReduce],
    burn_s: float,
    home: Path,
    say: Callable[[str], None],
) -> Iterator[Finding]:
    """Burn all hosts in for so long, judge them, and remember their speeds."""
    rounds: dict[str, list[AllReduced]] = {name: [] for name in steps}
    began_s, left, failed = time.monotonic(), dict(steps), dict[str, str]()
    while left and (left_s := began_s + burn_s - time.monotonic()) > (ROUND_S_MIN if any(rounds.values()) else 0):
        say(f"burn-in: {burn_s - left_s:.0f} of {burn_s:.0f} s")
        round_s = min(left_s, ROUND_S_MAX)
        asked = {name: replace(step, burn_s=round_s) for name, step in left.items()}
        for name, answer in ask(asked, AllReduced, round_s + ROUND_EXTRA_S_MAX).items():
            fault = str(answer) if isinstance(answer, LaunchError) else answer.fault
            if fault:
                failed[name] = fault
                del left[name]
            elif isinstance(answer, AllReduced):
                rounds[name].append(answer)
    for name, fault in failed.items():
        yield warning("burn-in", [name], f"{name}: its burn-in did not run to the end: {fault}", _FIX)
    results = {name: _merge(answers) for name, answers in rounds.items() if answers}
    known = host_health.read_all(home)
    earlier = {
        name: (time.strftime("%Y-%m-%d", time.gmtime(one.burned_at)), AllReduced("", one.devices, {part: (speed,) for part, speed in one.speeds.items()}))
        for name in results if (one := known.get(name)) is not None and one.burned_at is not None
    }  # fmt: skip
    judged = [one.finalize(describe(one), 0 if one.ok else 3) for one in judgement.findings(results, earlier)]
    for name, result in results.items():
        faults = [one.found for one in judged if one.severity is Severity.ERROR and one.nodes == (name,)]
        speeds = {part: min(values) for part, values in result.speeds.items()}
        fault = f"burn-in: {faults[0]}" if faults else ""
        with contextlib.suppress(OSError):  # the burn-in is valid without it
            host_health.write(
                home, HostHealth(name, time.time(), fault, burned_at=time.time(), devices=result.devices, speeds=speeds)
            )
    yield from judged


def _merge(rounds: list[AllReduced]) -> AllReduced:
    """Return the rounds of a host as one: the median of each speed."""
    first = rounds[0]
    speeds = {
        part: tuple(map(statistics.median, zip(*(one.speeds[part] for one in rounds if part in one.speeds))))
        for part in first.speeds
    }
    sums = {kind: tuple(sorted({text for one in rounds for text in one.sums.get(kind, ())})) for kind in first.sums}
    wrong = tuple(dict.fromkeys(text for one in rounds for text in one.wrong))
    return replace(first, speeds=speeds, sums=sums, wrong=wrong)
