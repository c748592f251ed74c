"""What must be the same on all nodes: torch, CUDA, NCCL, driver, GPUs, Python. The odd ones out are named by majority.

A difference with which ranks cannot work together is an error: NCCL refuses another version of itself, and torch promises
nothing between versions of its own. The others make a job slow, or its failures hard to understand: warnings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.brain.checks.finding import Finding, Severity, names
from orchestrator.core.host_facts import HostFacts


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
    """Yield the odd ones out, a property at a time."""
    for one in _PROPERTIES:
        yield from _odd(one, {name: one.value(facts) for name, facts in nodes.items()})


def _odd(one: _Property, values: Mapping[str, str]) -> Iterator[Finding]:
    known = {name: value for name, value in values.items() if value}
    counts = Counter(known.values()).most_common()
    if len(counts) < 2:
        return
    usual, usual_count = counts[0]
    if usual_count == counts[1][1]:  # no majority: nobody can say which of them is the odd one
        parts = [f"{names(_with(known, value))} {one.noun}{value}" for value, _ in counts]
        yield Finding(one.severity, (), one.what, "they differ: " + ", ".join(parts), one.fix)
        return
    others = f"the other {usual_count}"
    for value, _ in counts[1:]:
        yield Finding(
            one.severity,
            tuple(_with(known, value)),
            one.what,
            f"{one.noun}{value}, {others} {usual}",
            one.fix,
        )


def _with(values: Mapping[str, str], wanted: str) -> list[str]:
    return [name for name, value in values.items() if value == wanted]


def _torch(facts: HostFacts) -> str:
    return facts.program.torch if facts.program else ""


def _cuda(facts: HostFacts) -> str:
    return (facts.program.cuda or "none") if facts.program and facts.program.torch else ""


def _nccl(facts: HostFacts) -> str:
    return facts.program.nccl if facts.program else ""


def _python(facts: HostFacts) -> str:
    """Return the version without its last part, which changes nothing that travels between ranks."""
    return ".".join(facts.program.python.split(".")[:2]) if facts.program else ""


def _driver(facts: HostFacts) -> str:
    return ", ".join(dict.fromkeys(gpu.driver for gpu in facts.gpus))


def _model(facts: HostFacts) -> str:
    return ", ".join(dict.fromkeys(gpu.model for gpu in facts.gpus))


def _count(facts: HostFacts) -> str:
    return str(len(facts.gpus))


_SAME_PACKAGES = "install the same version on all of them"
_PROPERTIES = (
    _Property("torch", "torch ", _torch, Severity.ERROR, _SAME_PACKAGES),
    _Property("cuda", "a torch with CUDA ", _cuda, Severity.WARNING, _SAME_PACKAGES),
    _Property("nccl", "NCCL ", _nccl, Severity.ERROR, _SAME_PACKAGES),
    _Property(
        "python", "Python ", _python, Severity.WARNING, "name the same Python on all of them in python:"
    ),
    _Property(
        "gpu",
        "",
        _model,
        Severity.WARNING,
        "a job is as fast as its slowest GPU: take the odd ones off the list",
    ),
    _Property(
        "gpu", "the GPU count ", _count, Severity.WARNING, "see with nvidia-smi whether a GPU is lost there"
    ),
    _Property("driver", "driver ", _driver, Severity.WARNING, "install the same driver on all of them"),
)
