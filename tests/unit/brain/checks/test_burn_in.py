"""Does a burn-in name the slow and the wrong host, and no innocent one?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.brain.checks import burn_in
from orchestrator.brain.checks.finding import Finding, Severity
from orchestrator.core.host_facts import AllReduced

GOOD = AllReduced(
    "", ("H100, torch 2.6",), {"bfloat16": (480.0,), "disk": (1.0,)}, {"float32": ("a",), "bfloat16": ("b",)}
)
EIGHT = {f"node-{number}": GOOD for number in range(1, 9)}


def judge(hosts: dict[str, AllReduced], earlier: dict[str, tuple[str, AllReduced]] | None = None) -> list[Finding]:
    return [one for one in burn_in.findings(hosts, earlier or {}) if one.severity is not Severity.OK]


def reduces(speeds: dict[str, float], busy: str = "") -> list[tuple[tuple[str, ...], str]]:
    """Return the warnings about pairs such as `ab`."""
    groups = {tuple(names): speed for names, speed in speeds.items()}
    results = {name: replace(GOOD, busy=0.5 if name in busy else 0.0) for names in speeds for name in names}
    found = burn_in.judge_reduces(groups, results)
    return [(one.nodes, one.found) for one in found if one.severity is Severity.WARNING]


def test_equal_hosts_have_no_finding() -> None:
    assert judge(EIGHT) == []


def test_each_host_has_a_line_with_its_figures() -> None:
    (one,) = burn_in.findings({"n": replace(GOOD, speeds={"bfloat16": (480.0, 470.0), "disk": (1.0, 0.0)})}, {})
    assert one.found == "n: H100, torch 2.6: bfloat16 470 TFLOP/s, disk 1 GB/s"
    assert one.as_json()["figures"] == {"bfloat16": 470.0, "disk": 1.0}
    (one,) = burn_in.findings({"n": replace(GOOD, speeds={})}, {})
    assert one.found == "n: H100, torch 2.6: too short for a speed"


@pytest.mark.parametrize(
    ("speed", "named"), [(412.0, True), (431.0, True), (433.0, False), (600.0, False), (0.0, False)]
)
def test_host_that_is_10_percent_below_is_named(speed: float, named: bool) -> None:
    found = judge(EIGHT | {"node-3": replace(GOOD, speeds={"bfloat16": (speed,), "disk": (0.55,)})})
    assert [one.nodes for one in found] == [("node-3",)] * named


def test_slow_host_has_a_sentence() -> None:
    (one,) = judge(EIGHT | {"node-3": replace(GOOD, speeds={"bfloat16": (412.0,), "disk": (0.8,)})})
    assert one.severity is Severity.WARNING and one.fix
    assert one.found == "bfloat16 is 14% slower than the median of 8 equal ones (412 beside 480 TFLOP/s)"


def test_slow_gpu_is_named_by_its_number() -> None:
    pair = replace(GOOD, devices=GOOD.devices * 2, speeds={"bfloat16": (480.0, 480.0), "disk": (1.0, 0.0)})
    found = judge({"one": pair, "two": replace(pair, speeds={"bfloat16": (480.0, 300.0)})})
    assert [(one.severity, one.nodes) for one in found] == [
        (Severity.WARNING, ("two",)),
        (Severity.NOTE, ("one",)),
    ], "four GPUs have a median, one disk has none"
    assert found[0].found.startswith("GPU 1: bfloat16 is 38% slower than the median of 4 equal ones")


def test_two_hosts_of_other_speeds_are_said_to_be_uncompared() -> None:
    (one,) = judge({"one": GOOD, "two": replace(GOOD, speeds={"bfloat16": (100.0,)})})
    assert (one.severity, one.nodes) == (Severity.NOTE, ("one", "two"))
    assert one.found == "not compared in all parts: fewer than 3 are equal"


def test_speed_beside_other_processes_is_not_judged() -> None:
    slow = replace(GOOD, speeds={"bfloat16": (100.0,)}, busy=0.4)
    (one,) = judge(EIGHT | {"node-3": slow}, {"node-3": ("2026-11-02", GOOD)})
    assert (one.severity, one.nodes) == (Severity.NOTE, ("node-3",))
    assert one.found == "other processes used 40% of its processors, so its speed is not judged"


def test_other_checksum_is_an_error_of_that_host() -> None:
    for busy in (0.0, 0.9):
        other = replace(GOOD, sums={"float32": ("a",), "bfloat16": ("x",)}, busy=busy)
        (one,) = [one for one in judge(EIGHT | {"node-5": other}) if not one.ok]
        assert one.nodes == ("node-5",) and "another checksum than the other 7" in one.found


def test_of_two_hosts_both_are_named() -> None:
    found = judge({"one": GOOD, "two": replace(GOOD, sums={"float32": ("a",), "bfloat16": ("x",)})})
    assert [(one.severity, one.nodes) for one in found] == [
        (Severity.ERROR, ("one", "two")),
        (Severity.NOTE, ("one", "two")),
    ]
    assert "not known whose is right" in found[0].found


def test_host_that_proves_itself_wrong_is_named_alone() -> None:
    bad = replace(GOOD, sums={"float32": ("x",)}, wrong=("a float32 product is not the exact one",))
    (one,) = [one for one in judge({"one": GOOD, "two": bad}) if not one.ok]
    assert one.nodes == ("two",)
    assert one.found == "a float32 product is not the exact one: its results cannot be trusted"


def test_what_could_not_be_tried_is_a_warning() -> None:
    (one,) = judge(EIGHT | {"node-2": replace(GOOD, notes=("bfloat16 cannot be tried: RuntimeError: no",))})
    assert (one.severity, one.nodes) == (Severity.WARNING, ("node-2",))


def test_other_hardware_is_not_compared() -> None:
    other = AllReduced("", ("A100, torch 2.6",), {"bfloat16": (250.0,)}, {"bfloat16": ("c",)})
    (one,) = judge(EIGHT | {"node-9": other})
    assert (one.severity, one.nodes) == (Severity.NOTE, ("node-9",))


def test_slower_than_before_is_named_with_the_date() -> None:
    before = replace(GOOD, speeds={"bfloat16": (560.0,)})
    (one,) = judge(EIGHT, {"node-1": ("2026-11-02", before)})
    assert one.nodes == ("node-1",) and one.found.startswith("bfloat16 is 14% slower than on 2026-11-02 (480 beside")
    assert judge(EIGHT, {"node-1": ("2026-11-02", replace(before, devices=("H100, torch 2.7",)))}) == []


def test_host_of_slow_all_reduces_is_named_and_not_its_neighbours() -> None:
    (one,) = reduces({"ab": 10, "bc": 4, "cd": 4, "da": 10, "abcd": 4})
    assert one[0] == ("c",)
    assert one[1] == "all-reduce with each neighbour is 60% slower than the median (4 beside 10 GB/s)"
    assert [nodes for nodes, _ in reduces({"ca": 4, "ab": 10, "bc": 4})] == [("c",)]


def test_single_slow_pair_is_named_as_a_pair() -> None:
    assert [nodes for nodes, _ in reduces({"ab": 10, "bc": 4, "cd": 10, "da": 9})] == [("b", "c")]
    assert reduces({"ab": 10, "bc": 8, "cd": 10, "da": 9}) == []


def test_all_reduces_of_two_hosts_or_busy_ones_are_not_judged() -> None:
    assert reduces({"ab": 1}) == []
    assert reduces({"ab": 10, "bc": 4, "cd": 4, "da": 10}, busy="c") == []


def test_all_reduces_have_a_line_for_the_slowest_and_for_all() -> None:
    results = dict.fromkeys("abc", GOOD)
    found = [one.found for one in burn_in.judge_reduces({("c", "a"): 9, ("a", "b"): 8, ("b", "c"): 9, ("a", "b", "c"): 7}, results)]  # fmt: skip
    assert found == ["all-reduce of a and b, the slowest of 3 pairs: 8 GB/s", "all-reduce of all 3 hosts: 7 GB/s"]
    assert list(burn_in.judge_reduces({}, {})) == []
