"""How soon does a supervisor know again what it has to know, and what do `orch why` and `orch status` cost, when a job is old?

`python -m bench.revival [DAYS]` (30 by default): the journal of a job of 512 ranks on 64 nodes that saves each half hour, is
looked at in each long evaluation, and is restarted once a day. Each figure stands beside that of a job of the same size
that has just begun: seconds, and the most memory that the process had (aim: 50 MB more at most).
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core import codec, observations
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.jobdir import home, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.journal.journaled_brain import JournaledBrain
from orchestrator.supervisor import status as status_object
from tests.support import jobs
from tests.support.frames import frame

DAYS = 30
NODES, PER_NODE = 64, 8
SAVE_S, EVALUATE_S, HOUR_S, DAY_S = 1800.0, 4 * 3600.0, 3600.0, 86_400.0
STEP_S = 2.0
RUNS = 5
RUN_S_MAX = 600.0

MEASURED = """
import atexit, pathlib, re, sys
atexit.register(lambda: print(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1], file=sys.stderr))
"""
REVIVE = f"""{MEASURED}
from orchestrator.journal.journaled_brain import JournaledBrain
from orchestrator.core.jobdir.layout import JobDir
JournaledBrain(JobDir(pathlib.Path(sys.argv[1])), "machine")
"""
COMMAND = f"{MEASURED}\nfrom orchestrator.cli import main\nmain()"

FRAMES = tuple(f"{jobs.ROOT}/code/package/module_{frame}.py:{100 + frame} function_{frame}" for frame in range(20))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a command took at most."""

    wall_s: float
    memory_mb: float


def begin(attempt: int, at: float) -> Iterator[News]:
    """All nodes come up, are prepared and start."""
    resume = ResumePoint(f"{jobs.ROOT}/checkpoints/step-{attempt}.pt", attempt) if attempt > 1 else None
    yield d.BeginAttempt(at, "restart", attempt, resume)
    for node in range(NODES):
        name = f"node-{node}"
        yield d.Launch(at, "needed", attempt, name)
        yield e.AgentUp(at, name, f"boot-{attempt}-{node}", 0, 0, "10.0.0.1", 0, ())
        yield d.To(at, "needed", name, orders.Prepare(attempt, resume))
        yield e.FromNode(at + 1, name, reports.Prepared(attempt, "10.0.0.1", 29500, ()))
    for node in range(NODES):
        yield d.To(at + 2, "all are ready", f"node-{node}", orders.Start(attempt, "10.0.0.1", 29500, ""))
        pids = tuple(range(1000 + PER_NODE * node, 1000 + PER_NODE * (node + 1)))
        yield e.FromNode(at + 3, f"node-{node}", reports.Started(attempt, pids))


def beats(attempt: int, at: float, count: int) -> Iterator[News]:
    """Every rank has made so many steps."""
    for node in range(NODES):
        ranks = range(PER_NODE * node, PER_NODE * (node + 1))
        told = tuple(
            RankHeartbeat(rank, count, "R", 100 * count, 3.7 * count, 11 * count, STEP_S, 1.9) for rank in ranks
        )
        yield e.FromNode(at, f"node-{node}", reports.Heartbeat(attempt, told))


def looked(attempt: int, at: float, look: int) -> Iterator[News]:
    """Every rank is looked at, in an evaluation."""
    for node in range(NODES):
        yield d.To(at, "no step for long", f"node-{node}", orders.Inspect(attempt, look))
    for node in range(NODES):
        ranks = tuple(
            observations.RankInspection(
                rank, 1000 + rank, "R", observations.Activity.PROGRESSING, 0.0, frame(FRAMES[0]), "computes", "evaluate", FRAMES,
                (), (), (), (), gpu_use=0.9,
            )
            for rank in range(PER_NODE * node, PER_NODE * (node + 1))
        )  # fmt: skip
        yield e.FromNode(at + 1, f"node-{node}", reports.Inspected(attempt, look, ranks))


def crash(attempt: int, at: float, count: int) -> Iterator[News]:
    """One rank crashes, all others are stopped."""
    failure = observations.Failure("RuntimeError", "NCCL error", "Traceback\n" * 20, frame("train.py:10 step"))
    verdict = d.Verdict(
        d.VerdictKind.CRASH,
        (1,),
        "node-0",
        "rank 1: NCCL error",
        (d.Evidence("evidence"),),
        d.FailureSignature(d.VerdictKind.CRASH),
        count,
        at,
        True,
    )
    yield e.FromNode(at, "node-0", reports.Exited(attempt, 1, 1, None, count, failure, False, False))
    yield d.Judge(at, verdict.summary, attempt, verdict)
    for node in range(NODES):
        yield d.To(at, "over", f"node-{node}", orders.Stop(attempt, 5.0))
        for rank in range(PER_NODE * node, PER_NODE * (node + 1)):
            if rank != 1:
                yield e.FromNode(
                    at + 1, f"node-{node}", reports.Exited(attempt, rank, None, 15, count, None, False, True)
                )
        yield e.FromNode(at + 2, f"node-{node}", reports.Stopped(attempt, "asked"))


def life(attempt: int, since_s: float, until_s: float) -> Iterator[News]:
    """An attempt trains, saves, and is silent in each evaluation for long enough to be looked at."""
    hours = range(1, int((until_s - since_s) / SAVE_S) + 1)
    for number in hours:
        at = since_s + number * SAVE_S
        count = int((at - since_s) / STEP_S)
        yield from beats(attempt, at, count)
        saves = 100 * attempt + number
        yield jobs.saved(at, number=saves, main=f"{attempt}-{count}.pt", attempt=attempt, steps=count, step=count)
        if number % int(EVALUATE_S / SAVE_S) == 0:
            for look in (2 * number, 2 * number + 1):
                yield from looked(attempt, at + 60 + look % 2, look)


def make(place: Path, days: float) -> JobDir:
    """Make the folder of a job that is so old, as a supervisor leaves it that is killed in its last hour."""
    plan = jobs.plan(name="old", nodes=NODES, procs_per_node=PER_NODE)
    job = JobDir(place / "jobs" / home.new_id("old", time.time()))
    job.root.mkdir(parents=True)
    plan = codec.unpack(type(plan), {**codec.pack(plan), "id": job.id})
    job.plan.write_text(codec.dumps(plan))
    memory = JournaledBrain(job, "machine")
    memory.learn(jobs.planned(plan))
    memory.learn(e.SupervisorStarted(0.0, 1))
    attempt, end_s = 0, days * DAY_S
    for attempt in range(1, max(1, int(days)) + 1):
        at = (attempt - 1) * DAY_S
        over_s = min(at + DAY_S, end_s) - HOUR_S
        for news in (*begin(attempt, at), *beats(attempt, at + 9, 1), *life(attempt, at + 9, over_s)):
            memory.learn(news)
        for news in crash(attempt, over_s + 100, 1) if attempt < int(days) else ():
            memory.learn(news)
        memory.sync()
    memory.close()
    memory = JournaledBrain(job, "machine")
    memory.sync()  # the facts are written down; then an hour goes by
    for news in (
        e.SupervisorStarted(end_s, 2),
        *beats(attempt, end_s + 9, 40_000),
        *looked(attempt, end_s + 60, 999),
    ):
        memory.learn(news)
    memory._journal.sync()
    status = status_object.status(plan, memory.facts, status_object.Now(end_s, time.time()), {})
    status_file.write(job, status, durable=False)
    job.ended.touch()  # so that no command revives it
    return job


def cost(program: str, words: list[str], job: JobDir) -> Cost:
    """Run a program of Python to its end; it says last what memory it had."""
    env = {**os.environ, "ORCH_HOME": str(job.root.parents[1])}
    start_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, *words], env=env, check=True, capture_output=True)
    return Cost(time.perf_counter() - start_s, int(done.stderr.split()[-1]) / 1024)


def main() -> None:
    days = float(sys.argv[1]) if len(sys.argv) > 1 else DAYS
    place = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    try:
        report(days, place)
    finally:
        shutil.rmtree(place)


def report(days: float, place: Path) -> None:
    """Measure in turns, and print."""
    old, fresh = make(place / "old", days), make(place / "fresh", 0.1)
    size_mb = {job: (job.journal.stat().st_size / 1e6, job.facts.stat().st_size / 1e6) for job in (old, fresh)}
    print(
        f"{NODES * PER_NODE} ranks after {days:g} days: a journal of {size_mb[old][0]:.0f} MB, facts of {size_mb[old][1]:.1f} MB"
        f" (fresh: {size_mb[fresh][0]:.1f} and {size_mb[fresh][1]:.1f} MB)"
    )
    for what, program, verb in (
        ("a supervisor's memory", REVIVE, []),
        ("orch why", COMMAND, ["why", "--json"]),
        ("orch status", COMMAND, ["status", "--json"]),
    ):
        taken: dict[JobDir, list[Cost]] = {old: [], fresh: []}
        for _ in range(RUNS):
            for job, costs in taken.items():
                costs.append(cost(program, [*verb, job.id] if verb else [str(job.root)], job))
        (s, mb), (fresh_s, fresh_mb) = (
            (statistics.median(one.wall_s for one in costs), max(one.memory_mb for one in costs))
            for costs in taken.values()
        )
        print(f"{what}: {s:.2f} s (aim: at most 2), {mb:.0f} MB; of a fresh job {fresh_s:.2f} s, {fresh_mb:.0f} MB")
    old.facts.unlink()
    alone = cost(REVIVE, [str(old.root)], old)
    print(f"a supervisor's memory from the journal alone: {alone.wall_s:.1f} s, {alone.memory_mb:.0f} MB")


if __name__ == "__main__":
    main()
