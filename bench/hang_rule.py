"""How often does the rule of hangs kill a job that is well, and how soon does it name and end one that hangs?

`python -m bench.hang_rule [JOBS]` runs synthetic jobs (10,000 by default) through the real brain: step times from
constant to heavy-tailed, evaluations, saves, loaders that stutter, slow first steps; every other job hangs somewhere.
What a look would find is drawn: work is seen to move at most looks, not at all. The figures stand in docs/hangs.md.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field

from orchestrator.brain.brain import Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.plan_types import Limits, PlannedNode
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from tests.support.frames import frame

JOBS = 10_000
BEAT_S = 1.0
STEPS_MAX = 200
JOB_S_MAX = 900.0
HANG_S_MAX = 4500.0
LIMIT_S = 1800.0
"""How long torch lets a collective of gloo wait."""

RANKS = 4
TIMES = ("constant", "normal", "lognormal", "pareto", "evaluates", "saves", "stutters")
HANGS = ("unlike", "one rank stands", "never entered", "network", "endless computation")
SEEN_MIN, SEEN_MAX = 0.6, 0.98
"""How likely one comparison of two looks sees that a rank works which does: drawn for each job."""

STILL_WORK = 0.02
"""How many long pauses look like no work at all: one long call of the kernel or of a library."""

LIMITS = Limits(600.0, 0.0, 60.0, 36.0, 15.0, 5.0, 3, 5.0, 300.0, (), None, "restart")


@dataclass(frozen=True, slots=True)
class Pause:
    """A step that takes `lasts_s`: who is busy in it, and what a look finds of those who are."""

    lasts_s: float
    ranks: tuple[int, ...]
    doing: observations.Activity
    phase: str
    seen: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One synthetic job. `hang`: how it ends, empty for well."""

    number: int
    times: str
    usual_s: float
    steps: tuple[Pause, ...]
    hang: str


@dataclass(slots=True)
class Outcome:
    """What became of it. `named_s`, `found_s`: from the last step to the name of a rank, and to the verdict."""

    plan: str
    hang: str
    false_kill: str = ""
    looks: int = 0
    watched_s: float = 0.0
    named_s: float | None = None
    found_s: float | None = None
    usual_s: float = 0.0
    culprit_right: bool = True


@dataclass(slots=True)
class _Job:
    """One job and its brain, on a clock of its own."""

    plan: Plan
    rng: random.Random
    brain: Brain = field(default_factory=Brain)
    now_s: float = 0.0
    count: int = 0
    recent_s: list[float] = field(default_factory=list)
    looks: int = 0
    looked_s: float = 0.0
    still_since: dict[int, float] = field(default_factory=dict)
    judged: d.Judge | None = None
    named_s: float | None = None
    pending: list[orders.Inspect] = field(default_factory=list)

    def begin(self) -> None:
        planned = e.Planned(0.0, (PlannedNode("n0", "", "", (), tuple(range(RANKS))),), LIMITS, None)
        self.hear(planned)
        self.hear(e.AgentUp(0.0, "n0", "a", 0, 0, "", 0, ()))
        self.hear(e.FromNode(0.0, "n0", reports.Prepared(1, "10.0.0.1", 5000, ())))
        self.hear(e.FromNode(0.0, "n0", reports.Started(1, tuple(range(100, 100 + RANKS)))))

    def hear(self, *news: e.Event) -> None:
        for event in news:
            self.brain.learn(dataclasses.replace(event, at=self.now_s))
        for _ in range(20):
            decisions, _ = self.brain.decide(self.now_s)
            if not decisions:
                return
            for decision in decisions:
                self.brain.learn(decision)
                if isinstance(decision, d.To) and isinstance(decision.order, orders.Inspect):
                    self.looks += 1
                    self.pending.append(decision.order)
                elif isinstance(decision, d.Notice) and decision.topic is d.NoticeTopic.SUSPECT:
                    self.named_s = self.named_s or self.now_s
                elif isinstance(decision, d.Judge):
                    self.judged, self.named_s = decision, self.named_s or self.now_s
        raise AssertionError("the brain does not come to rest")

    def beat(self, pause: Pause | None) -> None:
        usual = statistics.median(self.recent_s[-128:]) if len(self.recent_s) >= 3 else None
        busy = (
            pause.ranks
            if pause is not None and pause.doing in (observations.Activity.PROGRESSING, observations.Activity.SPINNING)
            else ()
        )
        ranks = tuple(
            RankHeartbeat(
                rank, self.count, "R" if rank in busy else "S", self.count, self.now_s if rank in busy else 0.0,
                median_step_s=usual,
            )
            for rank in range(RANKS)
        )  # fmt: skip
        self.hear(e.FromNode(0.0, "n0", reports.Heartbeat(1, ranks)))

    def answer(self, pause: Pause) -> None:
        """Answer the looks that were ordered."""
        while self.pending and self.judged is None:
            look = self.pending.pop(0)
            found = tuple(self._found(rank, pause) for rank in range(RANKS))
            self.looked_s = self.now_s
            self.hear(e.FromNode(0.0, "n0", reports.Inspected(1, look.inspection, found)))

    def _found(self, rank: int, pause: Pause) -> observations.RankInspection:
        first = rank not in self.still_since
        busy = rank in pause.ranks
        moved = busy and pause.doing is observations.Activity.PROGRESSING and self.rng.random() < pause.seen
        if first or moved:
            self.still_since[rank] = self.now_s
        doing = observations.Activity.WAITING_FOR_RANKS
        if busy:
            doing = observations.Activity.PROGRESSING if moved else pause.doing
            doing = (
                observations.Activity.SPINNING if doing is observations.Activity.PROGRESSING and not moved else doing
            )
        if first:
            doing = observations.Activity.UNKNOWN
        is_unlike = busy and pause.why == "unlike"
        number = 10 + self.count * 3 + (0 if busy and len(pause.ranks) < RANKS and not is_unlike else 1)
        entered = observations.Collective(
            "0",
            "default group",
            tuple(range(RANKS)),
            number,
            "broadcast" if is_unlike else "all_reduce",
            "float32[8]",
            1.0,
            limit_s=LIMIT_S,
        )
        return observations.RankInspection(
            rank, 100 + rank, "S", doing, self.now_s - self.still_since[rank], frame("train.py:9 step"), pause.why if busy else "",
            pause.phase if busy else "train", ("train.py:9 step",), (entered,), (), (),
            (),
        )  # fmt: skip

    def go_through(self, pause: Pause) -> None:
        """Let one step take its time, with its beats and looks; the ranks step at its end."""
        until_s = self.now_s + pause.lasts_s
        self.still_since.clear()
        next_beat_s = (self.now_s // BEAT_S + 1) * BEAT_S
        while next_beat_s < until_s and self.judged is None:
            self.now_s = next_beat_s
            self.beat(pause)
            self.answer(pause)
            next_beat_s += BEAT_S
        if self.judged is None:
            self.now_s = until_s
            self.count += 1
            self.named_s = None
            self.recent_s.append(pause.lasts_s)


def make(number: int) -> Plan:
    """Draw a job."""
    rng = random.Random(number)
    times, usual_s = TIMES[number % len(TIMES)], rng.choice((0.05, 0.2, 1.0, 3.0, 10.0))
    seen = rng.uniform(SEEN_MIN, SEEN_MAX)
    steps, total_s = [_first(rng, seen)], 0.0
    every = rng.randint(10, 60)
    for step in range(1, STEPS_MAX):
        pause = _step(rng, times, usual_s, step % every == 0, seen)
        total_s += pause.lasts_s
        if total_s > JOB_S_MAX:
            break
        steps.append(pause)
    hang = HANGS[number // 2 % len(HANGS)] if number % 2 else ""
    return Plan(number, times, usual_s, tuple(steps), hang)


def _first(rng: random.Random, seen: float) -> Pause:
    return Pause(
        rng.choice((2.0, 10.0, 40.0, 120.0)),
        tuple(range(RANKS)),
        observations.Activity.PROGRESSING,
        "import",
        seen,
    )


def _step(rng: random.Random, times: str, usual_s: float, special: bool, seen: float) -> Pause:
    everyone = tuple(range(RANKS))
    lasts_s = usual_s
    match times:
        case "normal":
            lasts_s = max(0.2 * usual_s, rng.gauss(usual_s, 0.2 * usual_s))
        case "lognormal":
            lasts_s = usual_s * rng.lognormvariate(0.0, 0.8)
        case "pareto":
            lasts_s = usual_s * rng.paretovariate(1.6)
        case "evaluates" if special:
            ranks = (0,) if rng.random() < 0.5 else everyone
            return _pause(rng, usual_s * rng.uniform(10, 30), ranks, "evaluate", seen)
        case "saves" if special:
            return _pause(rng, rng.uniform(5.0, 60.0), (0,), "save", seen)
        case "stutters" if special:
            return _pause(rng, rng.uniform(2.0, 25.0), (rng.randrange(RANKS),), "train", seen)
        case _:
            pass
    return _pause(rng, lasts_s, everyone, "train", seen)


def _pause(rng: random.Random, lasts_s: float, ranks: tuple[int, ...], phase: str, seen: float) -> Pause:
    """A pause in which work shows, or now and then none does."""
    still = rng.random() < STILL_WORK
    return Pause(
        lasts_s,
        ranks,
        observations.Activity.BLOCKED if still else observations.Activity.PROGRESSING,
        phase,
        seen,
    )


def _hang(rng: random.Random, kind: str) -> Pause:
    odd = (rng.randrange(RANKS),)
    match kind:
        case "unlike":
            return Pause(HANG_S_MAX, odd, observations.Activity.WAITING_FOR_RANKS, "train", 0.0, "unlike")
        case "one rank stands":
            return Pause(HANG_S_MAX, odd, observations.Activity.BLOCKED, "train", 0.0)
        case "never entered":
            return Pause(HANG_S_MAX, odd, observations.Activity.WAITING_FOR_RANKS, "train", 0.0)
        case "network":
            return Pause(HANG_S_MAX, (), observations.Activity.WAITING_FOR_RANKS, "train", 0.0)
        case _:
            return Pause(HANG_S_MAX, odd, observations.Activity.SPINNING, "train", 0.0)


def play(number: int) -> Outcome:
    """Run one job through the brain."""
    plan = make(number)
    rng = random.Random(number + 1)
    job = _Job(plan, rng)
    job.begin()
    outcome = Outcome(plan.times, plan.hang)
    last = rng.randrange(20, STEPS_MAX) if plan.hang else STEPS_MAX
    for pause in plan.steps[:last]:
        job.go_through(pause)
        if job.judged is not None:
            outcome.false_kill = f"job {number} ({plan.times}): {job.judged.why}"
            break
    outcome.looks, outcome.watched_s = job.looks, job.now_s
    outcome.usual_s = statistics.median(job.recent_s) if job.recent_s else 0.0
    if plan.hang and not outcome.false_kill:
        stepped_s, pause = job.now_s, _hang(rng, plan.hang)
        job.go_through(pause)
        if job.named_s is not None:
            outcome.named_s = job.named_s - stepped_s
        if job.judged is not None:
            outcome.found_s = job.now_s - stepped_s
            outcome.culprit_right = job.judged.verdict.ranks == pause.ranks
    return outcome


def report(outcomes: list[Outcome]) -> str:
    """Return the figures as lines."""
    killed = [one for one in outcomes if one.false_kill]
    hours = sum(one.watched_s for one in outcomes) / 3600
    looks = sum(one.looks for one in outcomes)
    lines = [
        (
            f"{len(outcomes):,} jobs, {hours:,.0f} job hours: {len(killed)} killed though well, "
            f"{looks / hours:.1f} looks an hour"
        ),
        "",
        f"{'hang':22} {'jobs':>6} {'named':>8} {'p99':>8} {'ended':>8} {'p99':>8} {'culprit right':>14}",
    ]
    for kind in HANGS:
        those = [one for one in outcomes if one.hang == kind and not one.false_kill]
        named = sorted(one.named_s for one in those if one.named_s is not None)
        ended = sorted(one.found_s for one in those if one.found_s is not None)
        if not ended:
            continue
        right = sum(one.culprit_right for one in those)
        lines.append(f"{kind:22} {len(those):6} {_median(named)} {_median(ended)} {right / len(those):14.1%}")
    lines += ["", *(f"  {one.false_kill}" for one in killed[:10])]
    lines += [f"  by step times: {dict(Counter(one.plan for one in killed))}"] if killed else []
    return "\n".join(lines)


def _median(figures_s: list[float]) -> str:
    p99 = figures_s[min(len(figures_s) - 1, int(0.99 * len(figures_s)))]
    return f"{statistics.median(figures_s):6.1f} s {p99:6.1f} s"


def main(words: list[str]) -> int:
    """Play so many jobs and print what came of them."""
    jobs = int(words[0]) if words else JOBS
    with multiprocessing.Pool(os.cpu_count()) as pool:
        outcomes = pool.map(play, range(jobs), chunksize=50)
    print(report(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
