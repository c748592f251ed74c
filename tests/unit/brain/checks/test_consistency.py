"""Is the odd one out named by majority, and nothing where all are alike or nothing is known?"""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.brain.checks.consistency import findings
from orchestrator.brain.checks.finding import Severity
from orchestrator.core.host_facts import HostFacts

from .facts import GPU, HEALTHY, host, program

E, W = Severity.ERROR, Severity.WARNING


def named(count: int, odd: dict[int, HostFacts]) -> list[tuple[Severity, tuple[str, ...], str]]:
    nodes = {f"gpu{number:02}": odd.get(number, HEALTHY) for number in range(1, count + 1)}
    return [(one.severity, one.nodes, one.found) for one in findings(nodes)]


def test_equal_nodes_have_no_finding() -> None:
    """Nodes that are alike have no finding."""
    assert named(8, {}) == [] and named(1, {}) == [] and named(0, {}) == []


V100 = host(gpus=tuple(dataclasses.replace(gpu, model="V100") for gpu in HEALTHY.gpus))


@pytest.mark.parametrize(
    ("odd", "severity", "text"),
    [
        (program(torch="2.6.0"), E, "torch 2.6.0, the other 7 2.13.0"),
        (program(nccl="2.19.3"), E, "NCCL 2.19.3, the other 7 2.27.5"),
        (program(cuda=""), W, "a torch with CUDA none, the other 7 12.6"),
        (program(python="3.10.2"), W, "Python 3.10, the other 7 3.11"),
        (V100, W, "V100, the other 7 A100"),
        (host(gpus=(GPU,)), W, "the GPU count 1, the other 7 2"),
        (
            host(gpus=tuple(dataclasses.replace(g, driver="470.8") for g in HEALTHY.gpus)),
            W,
            "driver 470.8, the other 7 535.1",
        ),
    ],
)
def test_outlier_is_named(odd: HostFacts, severity: Severity, text: str) -> None:
    assert named(8, {3: odd}) == [(severity, ("gpu03",), text)]


def test_several_outliers_are_one_finding_per_value() -> None:
    found = named(8, {2: program(torch="2.6.0"), 5: program(torch="2.6.0"), 7: program(torch="2.7.0")})
    assert found == [
        (E, ("gpu02", "gpu05"), "torch 2.6.0, the other 5 2.13.0"),
        (E, ("gpu07",), "torch 2.7.0, the other 5 2.13.0"),
    ]


def test_no_node_is_outlier_without_majority() -> None:
    assert named(2, {2: program(torch="2.6.0")}) == [(E, (), "they differ: gpu01 torch 2.13.0, gpu02 torch 2.6.0")]


def test_python_patch_and_unknown_values_are_no_difference() -> None:
    assert named(3, {1: program(python="3.11.2"), 2: program(torch="", cuda="", nccl=""), 3: host(program=None)}) == []
