"""Runs the tests in groups side by side, and says at the end what came of each: `python -m tests.run quick | test | soak | pythons`.

Every group is one process; what it prints is shown when it is done. Most of them wait most of the time, so more run at
once than there are processors; tests that measure time run alone, at the end. The exit code is 0 when all is well; with
`--strict` a skipped test is a failure, but for one that needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]

SIDE_BY_SIDE = 6
"""How many groups run at once; with more, tests on two processors run out of the time that they give what they wait for."""

GROUP_S_MAX = 4 * 3600.0
END_S_MAX = 120.0
"""How long a group that took too long may take to clear up."""

SLOWEST_SHOWN = 10
FAILURE_CHARS_SHOWN = 600

NO_TESTS = 5
"""What pytest ends with when there was nothing to run."""


@dataclass(frozen=True, slots=True)
class Group:
    """A program of the virtual environment and its words; of pytest, the results are counted."""

    name: str
    words: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """What came of a group.

    `failures`: the message of each test that failed; `skips`: how many were skipped for which reason; `times_s`: of each test.
    """

    group: Group
    is_good: bool
    seconds: float
    output: str
    passed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)
    times_s: dict[str, float] = field(default_factory=dict)


CACHES = {"PYTHONDONTWRITEBYTECODE": ""}
"""Groups share what Python has compiled: without it each spends 10 s on the tests' own files, and a process of orch 0.2 s."""


STRICT_ENV = "ORCH_STRICT"
"""Set for the tests of a run in which none may be skipped."""


def tests(name: str, where: str, mark: str = "not soak and not quiet", **environ: str) -> Group:
    """Return the group of the tests that these words of a pytest command name, if their marks fit."""
    return Group(name, ("pytest", "-q", "-p", "no:cacheprovider", "-m", mark, *shlex.split(where)), environ)


def ignored(*where: str) -> str:
    """Return the words of a pytest command that leave these paths to other groups."""
    return " ".join(f"--ignore={path}" for words in where for path in words.split())


RUFF = (Group("ruff", ("ruff", "check", ".")), Group("ruff format", ("ruff", "format", "--check", ".")))
MYPY = Group("mypy", ("mypy",))
"""For the oldest Python that orch supports, see pyproject.toml."""
MYPY_NEWEST = Group("mypy, newest Python", ("mypy", "--python-version", "3.14"))
QUICK = "not slow and not quiet and not soak"

FIRST_LOCAL = "test_local_a or test_local_c or test_local_e"
"""The first half of the whole jobs on this machine, by the names of their files."""

OF_TORCH = "test_hook_ or test_checkpoints_ or test_flight_ or _torch.py"
"""What shows that the hook, saves and stacks fit the real torch, by the names of the files."""

LAUNCHERS_OF_TORCH = "every_launcher_call or rank_arguments_match"
"""Tests of whole jobs that call torch's own launcher."""

UNIT_BELOW = "tests/unit/core tests/unit/agent"
UNIT_ABOVE = "tests/unit/brain tests/unit/client tests/unit/cli tests/unit/journal"
UNIT_OTHERS = f"tests/unit {ignored(UNIT_BELOW, UNIT_ABOVE)}"

CLUSTER_FAULTS = "tests/cluster/test_ssh_faults.py tests/cluster/test_ssh_hosts.py tests/cluster/test_ssh_training.py"

SLURM_REQUEUE = "tests/slurm/test_slurm_requeue.py"
SLURM_VERSIONS = "tests/slurm/test_slurm_versions.py"
SLURM_QUEUE = "tests/slurm/test_slurm_queue.py tests/slurm/test_slurm_submit.py"

MILLION = 1_000_000

SUITES: dict[str, tuple[Group, ...]] = {
    "quick": (
        tests("unit, core and agent", UNIT_BELOW, QUICK),
        tests("unit, brain to client", UNIT_ABOVE, QUICK),
        tests("unit, others", UNIT_OTHERS, QUICK),
        tests("sim", "tests/sim tests/wiring", QUICK),
        MYPY,
        *RUFF,
    ),
    "pythons": (
        tests("unit, core and agent", UNIT_BELOW, QUICK),
        tests("unit, brain to client", UNIT_ABOVE, QUICK),
        tests("unit, others", UNIT_OTHERS, QUICK),
        tests("sim", "tests/sim tests/wiring", QUICK),
        tests("bundle", "tests/unit/submission/test_bundle.py"),
        tests(
            "jobs",
            f"tests/integration/test_pythons.py tests/integration/test_local_launch.py -k 'not ({LAUNCHERS_OF_TORCH})'",
        ),
    ),
    "test": (
        *RUFF,
        tests("innocents", "tests/hangs/test_healthy_jobs.py"),
        tests("hangs", "tests/hangs/test_hangs.py"),
        tests("integration, local, f to z", f"tests/integration -k 'test_local_ and not ({FIRST_LOCAL})'"),
        tests("unit, core and agent", UNIT_BELOW),
        tests("unit, others", UNIT_OTHERS),
        tests("integration, local, a to e", f"tests/integration -k '{FIRST_LOCAL}'"),
        tests("cluster, faults", CLUSTER_FAULTS),
        tests("sim", "tests/sim tests/wiring"),
        tests("cluster, others", f"tests/cluster {ignored(CLUSTER_FAULTS)}"),
        tests("integration, others", f"tests/integration -k 'not test_local_ and not ({OF_TORCH})'"),
        tests("integration, torch", f"tests/integration -k '{OF_TORCH}'"),
        tests("slurm, queue", SLURM_QUEUE),
        tests("slurm, others", f"tests/slurm {ignored(SLURM_REQUEUE, SLURM_QUEUE)}"),
        tests("ssh", "tests/ssh"),
        tests("slurm, requeue", SLURM_REQUEUE),
        tests("unit, brain to client", UNIT_ABOVE),
        MYPY,
        MYPY_NEWEST,
    ),
    "soak": (
        *(
            tests(
                f"a million nights, {n + 1} of 8",
                "tests/sim/test_nights.py -k random",
                "",
                ORCH_FIRST=str(n * MILLION // 8),
                ORCH_NIGHTS=str(MILLION // 8),
            )
            for n in range(8)
        ),
        tests("nights of all kinds", "tests/sim/test_nights.py", "", ORCH_NIGHTS="10000"),
        tests("bad input", "tests/unit/test_fuzz.py tests/unit/test_damage.py", "", ORCH_FUZZ="100"),
        tests("galleries", "tests/hangs", ""),
        tests("other Slurms", SLURM_VERSIONS, "soak"),
        tests("the rest", f"tests {ignored('tests/hangs', SLURM_VERSIONS)}", "soak and not quiet"),
        tests("galleries under load", "tests/hangs", "", ORCH_JOBS_AT_ONCE="8"),
        *(
            tests(
                f"again, {n} of 20",
                "tests/unit tests/integration tests/ssh",
                "slow and not soak",
                ORCH_FUZZ="1",
            )
            for n in range(1, 21)
        ),
    ),
}
"""What each command runs: first what may wait long or takes long, last what is short."""

QUIET = f"tests {ignored('tests/unit tests/sim tests/wiring')}"
"""Where tests that run alone can be; to read all of `unit` would take as long as they do."""

ALONE: dict[str, tuple[Group, ...]] = {
    "quick": (),
    "pythons": (),
    "test": (tests("quiet", QUIET, "quiet and not soak"),),
    "soak": (tests("quiet", QUIET, "quiet"),),
}
"""And what after it, each by itself."""


def main(words: Sequence[str]) -> int:
    """Run a suite, print what came of it, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.run")
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--strict", action="store_true", help="fail when a test is skipped")
    parser.add_argument("--side-by-side", type=int, default=SIDE_BY_SIDE)
    asked = parser.parse_args(words)
    if asked.strict:
        os.environ[STRICT_ENV] = "1"
    began_s = time.monotonic()
    results = []
    for result in run(asked.suite, asked.side_by_side):
        results.append(result)
        print(f"\n--- {result.group.name}\n{shown(result)}", flush=True)
    print(f"\n{table(results)}")
    is_good = all(one.is_good for one in results)
    skipped = [why for one in results for why in one.skips if not re.search("gpu|cuda", why, re.IGNORECASE)]
    if asked.strict and skipped:
        print("A test that is skipped proves nothing, so this run has failed.")
        is_good = False
    print(closing_line(results, time.monotonic() - began_s), flush=True)
    return 0 if is_good else 1


def run(suite: str, side_by_side: int) -> Iterator[Result]:
    """Run the groups of a suite; give each result as soon as it is there."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(side_by_side) as pool:
        begun = [pool.submit(_run, group, Path(folder)) for group in SUITES[suite]]
        yield from (one.result() for one in as_completed(begun))
        for group in ALONE[suite]:
            yield _run(group, Path(folder))


def _run(group: Group, folder: Path) -> Result:
    xml, log = folder / f"{group.name}.xml", folder / f"{group.name}.log"
    program, *words = group.words
    if program == "pytest":
        words.append(f"--junitxml={xml}")
    began_s = time.monotonic()
    with log.open("wb") as out:
        argv = [str(Path(sys.executable).with_name(program)), *words]
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, **CACHES, **group.environ},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        code = _wait(process)
    result = Result(group, code in (0, NO_TESTS), time.monotonic() - began_s, log.read_text(errors="replace"))
    if xml.exists():
        _count(result, xml)
    if not result.is_good and not result.failures:
        result.failures[group.name] = f"exit code {code}; what it printed is above"
    return result


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code; one that takes too long is interrupted, and killed if it does not clear up."""
    for limit_s, signum in ((GROUP_S_MAX, signal.SIGINT), (END_S_MAX, signal.SIGKILL)):
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signum)
    return process.wait()


def _count(result: Result, xml: Path) -> None:
    """Count what pytest has written of each test."""
    for case in ElementTree.parse(xml).iter("testcase"):
        name, skip = f"{case.get('classname')}::{case.get('name')}", case.find("skipped")
        result.times_s[name] = float(case.get("time", 0))
        wrong = [one.get("message", "") for what in ("failure", "error") for one in case.iter(what)]
        if wrong:
            result.failures.setdefault(name, wrong[0])  # a test and its end may both fail
        elif skip is not None:
            result.skips[skip.get("message", "")] += 1
        else:
            result.passed += 1


def shown(result: Result) -> str:
    """Return what a group has printed, of one that is well only the last line."""
    lines = result.output.rstrip().splitlines() or ["no output"]
    return lines[-1] if result.is_good else "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    """Return a line for each group, and one for each thing that was missing."""
    lines = [f"{'':24}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}"]
    for one in results:
        counts = f"{one.passed:8}{len(one.failures):8}{one.skips.total():8}"
        lines.append(f"{one.group.name:24}{counts}{one.seconds:9.1f}")
    skips = sum((one.skips for one in results), Counter[str]())
    if skips:
        lines += ["", "Not tested here, and what it needs:"]
        lines += [f"{count:6}  {reason}" for reason, count in skips.most_common()]
    times_s = {name: seconds for one in results for name, seconds in one.times_s.items()}
    slowest = sorted(times_s, key=lambda name: -times_s[name])[:SLOWEST_SHOWN]
    lines += ["", "The slowest tests:", *(f"{times_s[name]:6.0f} s  {name}" for name in slowest)]
    failures = {name: message for one in results for name, message in one.failures.items()}
    if failures:  # last, because whoever keeps only the end of the output needs them most
        lines += ["", "What failed (all of it is above):"]
        lines += [f"{name}\n{indent(message[:FAILURE_CHARS_SHOWN], '    ')}" for name, message in failures.items()]
    return "\n".join(lines)


def closing_line(results: Sequence[Result], seconds: float) -> str:
    """Return what pytest would close with, had it run all."""
    skipped = sum(one.skips.total() for one in results)
    counts = {
        "failed": sum(len(one.failures) for one in results),
        "passed": sum(one.passed for one in results),
    }
    parts = [f"{count} {what}" for what, count in {**counts, "skipped": skipped}.items() if count]
    minutes, rest_s = divmod(round(seconds), 60)
    return f"==== {', '.join(parts)} in {seconds:.2f}s ({minutes // 60}:{minutes % 60:02}:{rest_s:02}) ===="


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
