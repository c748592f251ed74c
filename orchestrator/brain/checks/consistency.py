"""Check that all nodes are alike: torch, CUDA, NCCL, driver, GPUs, Python. Outliers are found by majority.

A difference that keeps ranks from working together is an error: NCCL refuses another version of itself, and torch is not
compatible between versions. Other differences make a job slow or its failures hard to understand: they are warnings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.brain.checks.finding import Finding, Severity, join_names
from orchestrator.core.host_facts import GpuFacts, HostFacts, ProgramFacts


@dataclass(frozen=True, slots=True)
class _Property:
    """Something that should be the same everywhere; an empty text is not compared."""

    what: str
    # Before the value in a sentence, such as `torch `
    noun: str
    value: Callable[[HostFacts], str]
    severity: Severity
    fix: str


def findings(nodes: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Yield the outliers, one property at a time."""
    for one in _PROPERTIES:
        yield from _find_outliers(one, {name: one.value(facts) for name, facts in nodes.items()})


def _find_outliers(what: _Property, values: Mapping[str, str]) -> Iterator[Finding]:
    values_known = {name: value for name, value in values.items() if value}
    counts = Counter(values_known.values()).most_common()
    if len(counts) < 2:
        return
    usual, usual_count = counts[0]
    if usual_count == counts[1][1]:  # no majority: it is not known which of them is the outlier
        parts = [f"{join_names(_names_with(values_known, value))} {what.noun}{value}" for value, _ in counts]
        yield Finding(what.severity, (), what.what, "they differ: " + ", ".join(parts), what.fix)
        return
    others = f"the other {usual_count}"
    for value, _ in counts[1:]:
        outliers, found = tuple(_names_with(values_known, value)), f"{what.noun}{value}, {others} {usual}"
        yield Finding(what.severity, outliers, what.what, found, what.fix)


def _names_with(values: Mapping[str, str], expected: str) -> list[str]:
    return [name for name, value in values.items() if value == expected]


def _program(part: Callable[[ProgramFacts], str]) -> Callable[[HostFacts], str]:
    return lambda facts: part(facts.program) if facts.program else ""


def _gpus(part: Callable[[GpuFacts], str]) -> Callable[[HostFacts], str]:
    return lambda facts: ", ".join(dict.fromkeys(map(part, facts.gpus)))


_SAME_PACKAGES = "install the same version on all of them"
_SLOWEST = "a job is as fast as its slowest GPU: leave the slower ones out"
_COUNT = "see with nvidia-smi whether a GPU is lost there"
_ERROR, _WARNING = Severity.ERROR, Severity.WARNING
_PROPERTIES = (
    _Property("torch", "torch ", _program(lambda one: one.torch), _ERROR, _SAME_PACKAGES),
    _Property("cuda", "a torch with CUDA ", _program(lambda one: one.torch and (one.cuda or "none")), _WARNING, _SAME_PACKAGES),
    _Property("nccl", "NCCL ", _program(lambda one: one.nccl), _ERROR, _SAME_PACKAGES),
    # Without the last part of the version, which changes nothing that travels between ranks
    _Property("python", "Python ", _program(lambda one: ".".join(one.python.split(".")[:2])), _WARNING, "name the same Python on all of them in python:"),
    _Property("gpu", "", _gpus(lambda one: one.model), _WARNING, _SLOWEST),
    _Property("gpu", "the GPU count ", lambda facts: str(len(facts.gpus)), _WARNING, _COUNT),
    _Property("driver", "driver ", _gpus(lambda one: one.driver), _WARNING, "install the same driver on all of them"),
)  # fmt: skip
