"""Are hosts burned in by rounds, those that cannot be told from those that are wrong, and the rest remembered?"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.brain.checks import node
from orchestrator.brain.checks.finding import Finding
from orchestrator.client.checks import burn_in, cluster
from orchestrator.core.host import host_health
from orchestrator.core.host_facts import AllReduced
from orchestrator.core.wire.bootstrap import AllReduce
from tests.unit.brain.checks.facts import HEALTHY

STEP = AllReduce(0, 0, "", 0, "python", {}, on_gpu=False)
GOOD = AllReduced("", ("X, torch 2.6",), {"float32": (1.0,), "disk": (1.0,)}, {"float32": ("a",)})
Answer = AllReduced | LaunchError
T = TypeVar("T")


def finish(steps: Generator[Finding, None, T]) -> tuple[list[Finding], T]:
    """Return what a generator yields and returns."""
    found: list[Finding] = []
    while True:
        try:
            found.append(next(steps))
        except StopIteration as end:
            return found, end.value


class Hosts:
    """Hosts on which time passes only while they are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, AllReduce], Answer]) -> None:
        self.asked: list[dict[str, AllReduce]] = []
        self.now_s, self._answer = 1e6, answer
        clock = SimpleNamespace(
            monotonic=lambda: self.now_s, time=time.time, strftime=time.strftime, gmtime=time.gmtime
        )
        monkeypatch.setattr(burn_in, "time", clock)

    def ask(self, steps: Mapping[str, AllReduce], kind: type[AllReduced], limit_s: float) -> dict[str, Answer]:
        self.asked.append(dict(steps))
        longest_s = max(step.burn_s for step in steps.values())
        assert limit_s > longest_s
        self.now_s += longest_s
        return {name: self._answer(name, step) for name, step in steps.items()}

    def burn(
        self, home: Path, burn_s: float = 150.0, names: str = "abc"
    ) -> tuple[list[Finding], dict[str, AllReduced]]:
        return finish(burn_in.burn_in(self.ask, dict.fromkeys(names, STEP), burn_s, home, lambda text: None))


def test_rounds_last_as_long_as_asked_and_medians_are_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(name: str, step: AllReduce) -> Answer:
        return replace(GOOD, speeds={"float32": (0.2 if name == "b" and step.rank == 1 else 1.0,)})

    hosts = Hosts(monkeypatch, answer)
    found, results = hosts.burn(tmp_path)
    assert [(step["a"].rank, step["a"].burn_s) for step in hosts.asked] == [(0, 60.0), (1, 60.0), (2, 30.0)]
    assert results["b"].speeds == {"float32": (1.0,)}, "one bad round of three is none"
    assert [one.severity.value for one in found] == ["ok"] * 3
    assert {name: one.speeds for name, one in host_health.read_all(tmp_path).items()} == {name: {"float32": 1.0} for name in "abc"}  # fmt: skip


def test_round_without_a_speed_or_a_device_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    two = replace(GOOD, devices=GOOD.devices * 2, speeds={"float32": (1.0, 1.0), "disk": (0.0, 0.0)})
    rows: list[dict[str, tuple[float, ...]]] = [
        {"float32": (1.0, 1.0), "disk": (0.0, 0.0)},
        {"float32": (0.0, 2.0)},
        {"float32": (1.0,)},
    ]
    hosts = Hosts(monkeypatch, lambda name, step: replace(two, speeds=rows[step.rank]))
    _, results = hosts.burn(tmp_path, names="a")
    assert results["a"].speeds == {"float32": (1.0, 1.5), "disk": (0.0, 0.0)}


def test_host_that_cannot_be_burned_in_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(name: str, step: AllReduce) -> Answer:
        if name == "a":
            return LaunchError("lease", "2 slots wanted, 0 of 2 free: job x")
        return AllReduced("no answer within 210 s") if name == "b" and step.rank else GOOD

    hosts = Hosts(monkeypatch, answer)
    found, results = hosts.burn(tmp_path)
    assert [(one.severity.value, one.found) for one in found if one.fix] == [
        ("warning", "a: no burn-in: 2 slots wanted, 0 of 2 free: job x"),
        ("warning", "b: no burn-in after round 1: no answer within 210 s"),
    ]
    assert sorted(results) == ["b", "c"] and [sorted(asked) for asked in hosts.asked] == [
        ["a", "b", "c"],
        ["b", "c"],
        ["c"],
    ]


def test_wrong_host_is_remembered_until_it_computes_rightly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sums = {"c": "x"}
    hosts = Hosts(monkeypatch, lambda name, step: replace(GOOD, sums={"float32": (sums.get(name, "a"),)}))
    hosts.burn(tmp_path, 10.0)
    (one,) = host_health.recent_failures(tmp_path, time.time()).values()
    assert one.host == "c" and one.fault.startswith("burn-in: its float32 product of the same matrices has another")
    sums.clear()
    hosts.burn(tmp_path, 10.0)
    assert host_health.recent_failures(tmp_path, time.time()) == {}


def test_slow_or_busy_host_keeps_what_is_usual(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    hosts = Hosts(monkeypatch, lambda name, step: replace(GOOD, **state))
    hosts.burn(tmp_path, 10.0, "a")
    for now in ({"speeds": {"float32": (0.8,)}}, {"speeds": {"float32": (0.3,)}, "busy": 0.5}):
        state = now
        found, _ = hosts.burn(tmp_path, 10.0, "a")
        assert "slower than on " in found[1].found or "used 50% of its processors" in found[1].found
        assert host_health.read_all(tmp_path)["a"].speeds["float32"] == 1.0
    state = {"speeds": {"float32": (0.95,)}}
    assert [one.severity.value for one in hosts.burn(tmp_path, 10.0, "a")[0]] == ["ok"]
    assert host_health.read_all(tmp_path)["a"].speeds == {"float32": 0.95}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_all_reduces_run_over_each_pair_of_neighbours_and_over_all(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, lambda name, step: AllReduced("", speeds={"all-reduce": (1.0,)}))
    steps = {f"n{at}": replace(STEP, world=1, address=f"10.0.0.{at}", port=1000 + at) for at in range(count)}
    found, speeds = finish(burn_in._measure_reduces(hosts.ask, steps))
    ring = {frozenset((f"n{at}", f"n{(at + 1) % count}")) for at in range(count)}
    assert found == [] and {frozenset(pair) for pair in speeds if len(pair) == 2} == ring
    assert {step.world for step in hosts.asked[-1].values()} == {count} and len(hosts.asked[-1]) == count
    for asked in hosts.asked[:-1]:
        firsts = [(step.address, step.port) for step in asked.values()]
        assert all(firsts.count(first) == 2 for first in firsts), "each two meet elsewhere"


def test_pair_that_fails_twice_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(name: str, step: AllReduce) -> Answer:
        fails = step.address == "b" or (step.address == "a" and len(hosts.asked) < 2)
        return AllReduced("timed out" if fails else "", speeds={"all-reduce": (1.0,)})

    hosts = Hosts(monkeypatch, answer)
    found, speeds = finish(burn_in._measure_reduces(hosts.ask, {name: replace(STEP, address=name) for name in "abc"}))
    assert [one.found for one in found] == ["the all-reduce of b and c was not measured: timed out"]
    assert ("c", "a") in speeds and ("b", "c") not in speeds


def test_what_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = cluster.CheckRequest(
        job=node.JobNeeds(1, 0, False, 0), programs={"a": "", "b": "python"}, env={}, sources=(), own_modules=(), folders=("~/x",), addresses={}, port=None, interface=None, gpus_held=()
    )  # fmt: skip
    report = cluster.ClusterReport(facts={"a": HEALTHY, "b": HEALTHY})
    hosts = Hosts(monkeypatch, lambda name, step: GOOD)
    found = list(burn_in.check(hosts.ask, asked, report, 10.0, tmp_path, lambda text: None))
    assert [(one.nodes, one.found) for one in found if one.severity.value == "note"] == [
        (("a",), "no burn-in: the ranks' Python is in the code snapshot"),
        ((), "no all-reduce was measured: it takes two hosts that have passed the check"),
    ]
    assert hosts.asked[0]["b"].folder == "~/x"
