"""Versions of the programs around orch with which it was tested: the table of README, held against what `.ci/run` has."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata

ASK_S_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Tested:
    """A program: versions that each change is tested with, those with which its quick tests and two jobs run, and those
    that whole suites were run with by hand."""

    program: str
    each_change: tuple[str, ...]
    in_part: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()


TESTED = (
    Tested("Python", ("3.11",), ("3.10", "3.13"), ("3.10", "3.13", "3.14")),
    Tested("torch", ("2.13",), (), ("2.11 on one H200",)),
    Tested("Slurm", ("22.05",), (), ("24.11", "26.05")),
    Tested("OpenSSH", ("9.2",), (), ("10.0", "10.6")),
)


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| | each change | each change, in part | by hand, before a release |", "|---|---|---|---|"]
    lines += [
        f"| {one.program} | {' | '.join(', '.join(v) for v in (one.each_change, one.in_part, one.by_hand))} |"
        for one in TESTED
    ]
    return "\n".join(lines)


def here() -> dict[str, str]:
    """Return the version of each program on this machine, of those that are here."""
    found = {
        "Python": platform.python_version(),
        "torch": _installed("torch"),
        "Slurm": _said("slurmctld", "-V"),
        "OpenSSH": _said("ssh", "-V"),
    }
    return {program: match[0] for program, text in found.items() if (match := re.search(r"\d+\.\d+", text))}


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _said(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_S_MAX, check=False)
    except OSError:
        return ""
    return done.stdout + done.stderr
