"""Which share of the time makes a training go on, by how often it is saved, with orch and with a restart by hand?

`python -m bench.goodput [RUNS]` (20 by default) plays two rates of failure as a Monte Carlo: failures are drawn, journals are
written of what would follow, and what `orch goodput` counts is counted. How long a restart takes is measured first, on this
machine, with a rank that is killed; how long it takes until a lost host is judged, with the real brain in simulated nights. All
else that is assumed stands in the tables below and in docs/goodput.md.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orchestrator
from bench.run import RUN_S_MAX, main, spec, stamps
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.decisions import VerdictKind
from orchestrator.brain.model.facts import News
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.journal import goodput
from orchestrator.journal.goodput import TimeKind
from orchestrator.journal.job_record import Record
from orchestrator.journal.journal_file import JournalEntry
from orchestrator.spec.limits import limits_of
from orchestrator.spec.model import JobSpec
from tests.support.brain_story import LIMITS, planned_node
from tests.support.sim.night import Fault, Harm, Night
from tests.support.sim.world import World

RUNS = int(sys.argv[1]) if sys.argv[1:] else 20
DAY_S, MINUTE_S = 86_400.0, 60.0
SAVES_S = (MINUTE_S, 5 * MINUTE_S, 30 * MINUTE_S)
STEP_S = 5.0

LLAMA_3 = {
    "faulty GPU": (148, VerdictKind.CRASH), "GPU HBM3 memory": (72, VerdictKind.CRASH), "software bug": (54, VerdictKind.CRASH),
    "network switch or cable": (35, VerdictKind.HANG), "unplanned host maintenance": (32, VerdictKind.NODE_LOST),
    "GPU SRAM memory": (19, VerdictKind.CRASH), "GPU system processor": (17, VerdictKind.CRASH), "NIC": (7, VerdictKind.HANG),
    "NCCL watchdog timeouts": (7, VerdictKind.HANG), "silent data corruption": (6, VerdictKind.CRASH),
    "GPU thermal interface and sensor": (6, VerdictKind.CRASH), "SSD": (3, VerdictKind.NODE_LOST), "power supply": (3, VerdictKind.NODE_LOST),
    "server chassis": (2, VerdictKind.NODE_LOST), "IO expansion board": (2, VerdictKind.NODE_LOST), "dependency": (2, VerdictKind.CRASH),
    "CPU": (2, VerdictKind.NODE_LOST), "system memory": (2, VerdictKind.NODE_LOST),
}  # fmt: skip
"""The 419 unexpected interruptions in 54 days on 16,384 GPUs: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 5; 47 more
were planned. As what each cause shows itself is assumed."""
PLANNED = 47

HOSTS, NIGHTS = 8, 3
"""Of the job whose lost host the brain judges, and how many times."""

HANG_S = 600.0
"""The time limit of NCCL, for which orch waits where no state proves a hang: the worst case."""

NOTICED_S, BY_HAND_S = 30 * MINUTE_S, 10 * MINUTE_S
"""Assumed of people: how long until someone notices that a job stands or is gone, and how long the restart takes them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What befalls a job; without a kind a person plans an interruption."""

    at_s: float
    kind: VerdictKind | None


@dataclass(frozen=True, slots=True)
class Case:
    """A job and its failures. `load_s`: imports, process groups and the checkpoint, up to the first step, whoever restarts it
    (assumed); `orders_s`: what orch needs on top in a job of this size (docs/scale.md)."""

    name: str
    days: float
    load_s: float
    orders_s: float
    draw: Callable[[random.Random], Iterator[Failure]]


@dataclass(frozen=True, slots=True)
class Way:
    """How long it takes until a failure is known, and then until all ranks begin again."""

    name: str
    detect_s: dict[VerdictKind, float]
    restart_s: float


def llama_3(rng: random.Random) -> Iterator[Failure]:
    """Yield the interruptions of 54 days: as many of each cause as published, at any time."""
    kinds: list[VerdictKind | None] = [kind for count, kind in LLAMA_3.values() for _ in range(count)]
    kinds += [None] * PLANNED
    for kind in kinds:
        yield Failure(rng.uniform(0.0, 54 * DAY_S), kind)


def hourly(rng: random.Random) -> Iterator[Failure]:
    """Yield a failure every 45 to 75 minutes of a week, of the kinds of Llama 3."""
    kinds = [kind for count, kind in LLAMA_3.values() for _ in range(count)]
    at_s = 0.0
    while (at_s := at_s + rng.uniform(45 * MINUTE_S, 75 * MINUTE_S)) < 7 * DAY_S:
        yield Failure(at_s, rng.choice(kinds))


CASES = (
    Case("16,384 GPUs, Llama 3's 466 interruptions in 54 days", 54, 180.0, 5.3, llama_3),
    Case("64 GPUs, a failure every 45 to 75 min for a week", 7, 60.0, 0.0, hourly),
)


def journal(case: Case, way: Way, save_s: float, failures: list[Failure]) -> Iterator[News]:
    """Yield what the journal of a job tells. One rank stands for all, which do the same; nothing befalls a job that is down."""
    end_s, at_s, step, attempt = case.days * DAY_S, 0.0, 0, 1
    every = round(save_s / STEP_S)
    yield e.Planned(0.0, (planned_node("n0", 0),), LIMITS, None)
    yield e.AgentUp(0.0, "n0", "boot", 0, 0, "10.0.0.1", 0, ())
    yield from _begin(0.0, 1, 0)
    for failure in [*sorted(failures, key=lambda failure: failure.at_s), Failure(end_s, None)]:
        if failure.at_s <= at_s:
            continue
        works_s = at_s + case.load_s
        made = int(max(0.0, failure.at_s - works_s) / STEP_S)
        if made:
            yield _beat(works_s, attempt, 1)
            yield _beat(failure.at_s, attempt, made)
        if failure.at_s >= end_s:
            break
        step = (step + made) // every * every
        known_s = failure.at_s + (way.detect_s[failure.kind] if failure.kind is not None else 0.0)
        yield _over(failure, attempt, known_s)
        yield e.FromNode(known_s, "n0", reports.Stopped(attempt, "asked"))
        at_s, attempt = known_s + way.restart_s, attempt + 1
        if at_s >= end_s:
            break
        yield from _begin(at_s, attempt, step)
    yield d.EndJob(end_s, "the time is over", attempt, d.JobEnd.SUCCEEDED)


def _begin(at_s: float, attempt: int, step: int) -> Iterator[News]:
    resume = ResumePoint(f"step-{step}.pt", step, step) if step else None
    yield d.BeginAttempt(at_s, "restart", attempt, resume)
    yield d.To(at_s, "ready", "n0", orders.Start(attempt, "10.0.0.1", 29500, ""))
    yield e.FromNode(at_s, "n0", reports.Started(attempt, (1000,)))


def _beat(at_s: float, attempt: int, steps: int) -> News:
    return e.FromNode(at_s, "n0", reports.Heartbeat(attempt, (RankHeartbeat(0, steps, "S", 0, 0.0),)))


def _over(failure: Failure, attempt: int, at_s: float) -> News:
    if failure.kind is None:
        return d.Finish(at_s, "planned", attempt, d.AttemptEnd.RESTART)
    kind, since_s = failure.kind, failure.at_s
    verdict = d.Verdict(kind, (), "", kind.value, (), d.FailureSignature(kind), None, since_s, True)
    return d.Judge(at_s, kind.value, attempt, verdict)


def shares(case: Case, way: Way, save_s: float) -> list[dict[TimeKind, float]]:
    """Return the share of each kind of time, of each run; run for run each way and interval meets the same failures."""
    found = []
    for run in range(RUNS):
        record = Record()
        news = journal(case, way, save_s, list(case.draw(random.Random(run))))
        for number, one in enumerate(news, 1):
            record.learn(JournalEntry(number, one.at, one.at, "bench", "", 0, one))
        spent = goodput.from_record(record).rank_seconds()
        found.append({kind: rank_s / sum(spent.values()) for kind, rank_s in spent.items()})
    return found


def measured(folder: Path) -> tuple[float, float]:
    """Return how long it takes until the kill of a rank is judged, and from then to the next first step."""
    out = Path(tempfile.mkdtemp(dir=folder))
    file = spec(folder, f"train.py 100000 {out} 64", nodes=2, procs=2)
    job = orchestrator.submit(file, environ={**os.environ, "ORCH_HOME": str(folder / "home")})
    stamps(out, 4, 100)
    pid = job.status()["ranks"][1]["pid"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    stamps(out, 4, 100, attempt=2)
    time.sleep(1.2)
    job.cancel()
    job.wait(RUN_S_MAX)
    first = job.why()["attempts"][0]
    return first["verdict"]["detected_s"], first["restart_s"]


def node_lost_s() -> float:
    """Return how long after a host is gone the brain judges so, with the limits of a job file that sets none."""
    spec = JobSpec.model_validate(
        {
            "name": "b",
            "backend": "ssh",
            "nodes": f"{HOSTS}",
            "entrypoint": "train.py",
            "ssh": {"hosts": f"h[1-{HOSTS}]"},
        }
    )
    found = []
    for seed in range(NIGHTS):
        gone = Fault(Harm.HOST_LOST, node=HOSTS // 2, rank=HOSTS // 2, step=20)
        world = World(Night(seed, HOSTS, 1, limits_of(spec), (gone,), local=False, calm_s=1000.0))
        world.play()
        assert world.struck_s is not None
        found.append(world.ledger.tries[0].judged_s - world.struck_s)
    return statistics.median(found)


def lost(folder: Path) -> None:
    """Print the goodput of each case, by way and by how often it saves."""
    (crash_s, restart_s), gone_s = measured(folder), node_lost_s()
    print(
        f"here a killed rank is found after {crash_s:.2f} s, and the next first step comes {restart_s:.2f} s later; the brain "
        f"judges a lost host after {gone_s:.1f} s"
    )
    for case in CASES:
        known_s = {VerdictKind.CRASH: crash_s, VerdictKind.NODE_LOST: gone_s, VerdictKind.HANG: HANG_S}
        ours = Way("orch", known_s, restart_s + case.orders_s)
        theirs = Way("by hand", dict.fromkeys(known_s, NOTICED_S), BY_HAND_S)
        print(f"{case.name}; {RUNS} runs, {case.load_s:g} s to load")
        for save_s in SAVES_S:
            for way in (ours, theirs):
                _print(f"a save every {save_s / MINUTE_S:g} min, {way.name}", shares(case, way, save_s))


def _print(what: str, found: list[dict[TimeKind, float]]) -> None:
    kept = [100 * run[TimeKind.PRODUCTIVE] for run in found]
    rest = ", ".join(
        f"{kind} {share:.1f}"
        for kind in (TimeKind.WASTED, TimeKind.DETECTING, TimeKind.RECOVERING)
        if (share := 100 * statistics.median(run[kind] for run in found))
    )
    print(
        f"  {what:<32} {statistics.median(kept):5.1f} % [{min(kept):.1f}-{max(kept):.1f}]   {rest}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main({"goodput": lost}, []))
