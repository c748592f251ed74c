"""Figures of backend slurm, on a Slurm in a box: `python -m bench.slurm [submit] [restart] [queue]` (all by default).

All hosts and Slurm itself share this machine's processors, so figures are differences to something else in the same
run, taken in turns. Nothing is asserted; what the project aims at is printed beside what was found.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.ssh import in_turns, table
from tests.support.cluster import needs
from tests.support.cluster.desk import FAKE_TORCH, STEPPER, Desk, Job
from tests.support.cluster.slurm import SlurmBox

RUNS = int(os.environ.get("BENCH_RUNS", "5"))
JOBS = tuple(int(word) for word in os.environ.get("BENCH_JOBS", "10,200").split(","))
AT_ONCE = 4
WATCH_S = 60
RESTART_S_MAX = 120.0
NODES = 2

COUNTED = "/home/trainer/counted"
ASKED = f"{COUNTED}/asked"
COUNTER = '#!/bin/sh\necho {tool} >>{asked}\nexec /usr/bin/{tool} "$@"\n'
TOOLS = ("squeue", "sacct", "scontrol")

IDLE: dict[str, Any] = {
    "entrypoint": {"command": "sleep 600"},
    "procs_per_node": 1,
    "checkpoint": {"path": "*"},
}
HELD = {**IDLE, "slurm": {"extra": ["--hold"]}}
DIES = (
    STEPPER
    + """
print("began", time.time(), flush=True)
run(20 if attempt == 1 else 5)
if attempt == 1 and rank == 0:
    print("dies", time.time(), flush=True)
    os.kill(os.getpid(), 9)
elif attempt == 1:
    time.sleep(600)
"""
)


def submit() -> None:
    """`orch submit` against `sbatch` of a script that asks for the same."""
    with SlurmBox(NODES) as box:
        desk = Desk(box)
        path = desk.write({"README": "nothing to run\n"}, **HELD)

        def ours() -> float:
            start_s = time.perf_counter()
            desk.orch("submit", path)
            return time.perf_counter() - start_s

        def theirs() -> float:
            start_s = time.perf_counter()
            box.queue.sbatch("srun sleep 600", f"--nodes={NODES}", "--hold", "--output=/dev/null")
            return time.perf_counter() - start_s

        found = in_turns({"orch submit": ours, "sbatch": theirs}, RUNS)
        desk.clear_up()
    middle = {name: statistics.median(values) for name, values in found.items()}
    over_s = statistics.median(a - b for a, b in zip(found["orch submit"], found["sbatch"], strict=True))
    rows = [(*middle, "over sbatch"), (*(f"{value:.2f} s" for value in middle.values()), f"{over_s:.2f} s")]
    table("submit (aim: at most 0.5 s over sbatch's own time)", rows)


def restart() -> None:
    """The time from a rank's death to the first words of the next attempt, against backend local."""
    with SlurmBox(NODES) as box:
        desk = Desk(box)

        def restart_s(backend: str) -> float:
            job = desk.submit({"train.py": DIES, **FAKE_TORCH}, backend=backend)
            job.wait(RESTART_S_MAX)
            took_s = word_s(job, "began", attempt=2) - word_s(job, "dies", attempt=1)
            desk.clear_up()
            return took_s

        found = in_turns({name: partial(restart_s, name) for name in ("slurm", "local")}, RUNS)
    middle = {name: statistics.median(values) for name, values in found.items()}
    rows = [
        (*middle, "slurm - local"),
        (*(f"{value:.2f} s" for value in middle.values()), f"{middle['slurm'] - middle['local']:.2f} s"),
    ]
    table("restart in the allocation after a killed rank (aim: at most 0.5 s slower than local)", rows)


def word_s(job: Job, word: str, attempt: int) -> float:
    """Return the time that rank 0 has printed behind a word."""
    lines = job.log(0, attempt).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{word} "))


def queue() -> None:
    """How often Slurm is asked: by one look at all jobs, and in a minute of watching one of them."""
    rows = [("jobs", "orch status --all", f"orch status --watch, {WATCH_S} s")]
    with SlurmBox(NODES) as box:
        for tool in TOOLS:
            box.login.write(f"{COUNTED}/{tool}", COUNTER.format(tool=tool, asked=ASKED), mode=0o755)
        box.login.write(ASKED, "", user="trainer")
        desk = Desk(box)
        for count in JOBS:
            path = desk.write({"README": "nothing to run\n"}, **HELD)
            with ThreadPoolExecutor(AT_ONCE) as threads:
                list(threads.map(lambda _, path=path: desk.orch("submit", path), range(count)))
            rows.append((str(count), asked(desk, "--all"), asked(desk, "--watch", limit_s=WATCH_S)))
            desk.clear_up()
    table("questions to Slurm (aim: constant in the number of jobs)", rows)


def asked(desk: Desk, *words: str, limit_s: int = 600) -> str:
    """Return how often `orch status` with these words has run Slurm's commands; it is ended after so long."""
    log = desk.box.login.path(ASKED)
    log.write_text("")
    argv = ["timeout", str(limit_s), sys.executable, "-m", "orchestrator.cli", "status", *words]
    path = f"{COUNTED}:{Path(sys.executable).parent}:/usr/bin:/bin"
    home = "/home/trainer/desk/home"
    desk.box.login.run(argv, user="trainer", check=False, env={"PATH": path, "ORCH_HOME": home}, limit_s=limit_s + 10)
    counts = Counter(log.read_text().split())
    return ", ".join(f"{count} {tool}" for tool, count in sorted(counts.items())) or "none"


BENCHES = {"submit": submit, "restart": restart, "queue": queue}


def main(names: list[str]) -> int:
    """Run the named benches, or all."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    missing = needs.missing_slurm()
    if missing:
        print(f"no figures of backend slurm: {missing}", file=sys.stderr)
        return 0
    for name in names or BENCHES:
        BENCHES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
