"""Does a burn-in name the slow and the wrong host, and no innocent one?"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.brain.checks import burn_in
from orchestrator.brain.checks.finding import Finding, Severity
from orchestrator.core.host_facts import AllReduced

GOOD = AllReduced(
    "", ("H100, torch 2.6",), {"bfloat16": (480.0,), "disk": (1.0,)}, {"float32": ("a",), "bfloat16": ("b",)}
)
EIGHT = {f"node-{number}": GOOD for number in range(1, 9)}


def judge(hosts: dict[str, AllReduced], earlier: dict[str, tuple[str, AllReduced]] | None = None) -> list[Finding]:
    return [one for one in burn_in.findings(hosts, earlier or {}) if one.severity is not Severity.OK]


def test_equal_hosts_have_no_finding() -> None:
    assert judge(EIGHT) == []


def test_slow_host_is_named_and_a_slower_disk_is_not() -> None:
    (one,) = judge(EIGHT | {"node-3": replace(GOOD, speeds={"bfloat16": (412.0,), "disk": (0.8,)})})
    assert (one.severity, one.nodes) == (Severity.WARNING, ("node-3",)) and one.fix
    assert one.found == "bfloat16 is 14% slower than the median of 8 equal ones (412 beside 480 TFLOP/s)"


def test_other_checksum_is_an_error_of_that_host() -> None:
    (one,) = judge(EIGHT | {"node-5": replace(GOOD, sums={"float32": ("a",), "bfloat16": ("x",)})})
    assert (one.severity, one.nodes) == (Severity.ERROR, ("node-5",))
    assert "another checksum than the other 7" in one.found


def test_of_two_hosts_both_are_named() -> None:
    found = judge({"one": GOOD, "two": replace(GOOD, sums={"float32": ("a",), "bfloat16": ("x",)})})
    assert [(one.severity, one.nodes) for one in found] == [
        (Severity.ERROR, ("one", "two")),
        (Severity.NOTE, ("one", "two")),
    ]
    assert "not known whose is right" in found[0].found


def test_host_that_proves_itself_wrong_is_named_alone() -> None:
    bad = replace(GOOD, sums={"float32": ("x",)}, wrong=("a float32 product is not the exact one",))
    assert [one.nodes for one in judge({"one": GOOD, "two": bad}) if not one.ok] == [("two",)]


def test_other_hardware_is_not_compared() -> None:
    other = AllReduced("", ("A100, torch 2.6",), {"bfloat16": (250.0,)}, {"bfloat16": ("c",)})
    (one,) = judge(EIGHT | {"node-9": other})
    assert (one.severity, one.nodes) == (Severity.NOTE, ("node-9",))


def test_slower_than_before_is_named_with_the_date() -> None:
    before = {"node-1": ("2026-11-02", replace(GOOD, speeds={"bfloat16": (560.0,)}))}
    (one,) = judge(EIGHT, before)
    assert one.nodes == ("node-1",) and one.found.startswith("bfloat16 is 14% slower than on 2026-11-02")
