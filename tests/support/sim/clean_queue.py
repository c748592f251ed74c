"""What becomes of a job in a queue when exactly one thing happens? One night for each, and what is expected."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.decisions import JobEnd, VerdictKind

from .lease import Lease
from .ledger import Violation
from .night import Ask, Fault, Harm, Night, limits_of
from .pool import Hosts
from .world import World

FOR_EVER_S = float("inf")
KILL_S = 20.0
"""How long after TERM the queue kills a job that is expected to leave by itself. A simulated agent kills a stubborn rank up
to 2.2 times the grace, 13.2 s, after its order."""

PLACED_S_MAX = 12.0
"""How long after an allocation began ranks may be without nodes, where all is well."""


@dataclass(frozen=True, slots=True)
class Expected:
    """All verdicts, how often the job went back to the queue by itself, and how it ended; inf and None: not asked.

    `avoid`: the nodes that it asked not to have again; `saved`: the second attempt began where the first one was told
    to save itself; `again_s`: how long at least, and at most, from the first verdict to the next attempt.
    """

    verdicts: tuple[VerdictKind, ...] = ()
    requeues: int = 0
    end: JobEnd = JobEnd.SUCCEEDED
    attempts: int | None = None
    hosts: tuple[str, ...] | None = None
    avoid: tuple[str, ...] = ()
    saved: bool | None = None
    again_s: tuple[float, float] = (0.0, FOR_EVER_S)


Case = tuple[Night, Expected]
GONE, LAUNCH, LOST, OUT = (
    VerdictKind.PREEMPTED,
    VerdictKind.LAUNCH,
    VerdictKind.NODE_LOST,
    VerdictKind.TIME_LIMIT,
)


def queue_night(seed: int) -> Case:
    """Return a night in a queue in which one thing happens, and what is to come of it."""
    rng = random.Random(seed)
    step = rng.choice([step for step in range(12, 28) if step % 10 not in (0, 1, 8, 9)])
    plain = Night(
        seed, 2, rng.choice((1, 2)), limits_of(), steps=40, local=False, start_s=(2.0, 4.0), calm_s=300.0,
        says_ended=rng.random() < 0.5,
    )  # fmt: skip
    cases = [
        *_taken(plain, step),
        *_out_of_time(plain),
        *_cancelled(plain),
        *_lost(plain, step),
        *_unusable(plain),
        *_between_two(plain, step),
    ]
    return cases[seed % len(cases)]


def _taken(plain: Night, step: int) -> list[Case]:
    """The queue takes the nodes; that costs nothing, and a whole gang saves itself."""
    never = dataclasses.replace(plain, limits=limits_of(restarts_max=0))
    back = Expected((GONE,), 1, attempts=2, saved=True)
    away = Fault(Harm.BOSS_KILLED, step=step, lasts_s=1000.0)
    return [
        (_on(plain, Lease(4, kill_s=KILL_S), Fault(Harm.PREEMPTED, step=step)), back),
        (_on(never, Lease(4, kill_s=KILL_S), Fault(Harm.PREEMPTED, step=step)), back),
        (_on(plain, Lease(4, kill_s=KILL_S), Fault(Harm.REQUEUED, step=step)), back),
        (_on(plain, Lease(4, term_kills=True), Fault(Harm.PREEMPTED, step=step)), dataclasses.replace(back, saved=None)),
        (_on(never, Lease(4, kill_s=40.0), Fault(Harm.HANG, 19.0), Fault(Harm.PREEMPTED, 20.0)),
         Expected((GONE,), 1, attempts=2, again_s=(7.0, 60.0))),
        (_on(never, Lease(4, kill_s=12.0, grace_s=20.0, tells=True), Fault(Harm.HANG, 19.0), Fault(Harm.PREEMPTED, 20.0)),
         Expected((GONE,), 1, attempts=2, again_s=(6.0, 60.0))),
        (_on(plain, Lease(4), away, Fault(Harm.PREEMPTED, 60.0)), Expected((LOST,), 0, again_s=(0.0, 30.0))),
        (_on(plain, Lease(4), Fault(Harm.STALE_WORD, step=step)), Expected(attempts=1)),
        (_on(plain, Lease(4), Fault(Harm.BOSS_KILLED, step=step, lasts_s=20.0)), Expected(attempts=1)),
    ]  # fmt: skip


def _out_of_time(plain: Night) -> list[Case]:
    """The time limit of the allocation; with a way back to the queue and without."""
    away = Fault(Harm.BOSS_KILLED, 20.0, lasts_s=1000.0)
    slow = dataclasses.replace(plain, start_s=(90.0, 90.0), limits=limits_of(hang_timeout_s=None))
    hung = Fault(Harm.HANG, 42.0)
    return [
        (_on(plain, Lease(4, stay_s=45.0)), Expected((OUT,), 1, attempts=2, saved=True)),
        (_on(plain, Lease(4, stay_s=45.0, requeues=False)), Expected((OUT,), 0, JobEnd.FAILED, attempts=1)),
        (_on(plain, Lease(4, stay_s=75.0, grace_s=20.0), hung), Expected((OUT,), 1, attempts=2)),
        (_on(plain, Lease(4, stay_s=55.0), Fault(Harm.IMMORTAL, 30.0, lasts_s=400.0)), Expected((OUT,), 1, attempts=2)),
        (_on(plain, Lease(4, stay_s=45.0), away), Expected((OUT,), 0, JobEnd.FAILED, attempts=1)),
        (_on(slow, Lease(4, stay_s=45.0)), Expected((OUT,) * 3, 2, JobEnd.FAILED, attempts=3)),
    ]  # fmt: skip


def _cancelled(plain: Night) -> list[Case]:
    """Somebody cancels, here or in the queue."""
    over = Expected((), 0, JobEnd.CANCELLED)
    taken = (Fault(Harm.HANG, 19.0), Fault(Harm.PREEMPTED, 20.0))
    waits = Lease(4, wait_s=(30.0, 30.0), kill_s=30.0)
    return [
        (_on(plain, Lease(4), Fault(Harm.SCANCEL, 25.0)), dataclasses.replace(over, attempts=1)),
        (_on(plain, waits, Fault(Harm.SCANCEL, 5.0)), dataclasses.replace(over, attempts=0)),
        (_asked(_on(plain, Lease(4, kill_s=40.0, grace_s=20.0), *taken), Ask(24.0, cancel=True)),
         Expected((GONE,), 0, JobEnd.CANCELLED, attempts=1)),
        (_asked(_on(plain, waits, Fault(Harm.PREEMPTED, 50.0)), Ask(68.0, cancel=True)),
         Expected((GONE,), 1, JobEnd.CANCELLED, attempts=1)),
        (_asked(_on(plain, Lease(4), Fault(Harm.SCANCEL, 25.0)), Ask(90.0)), Expected(attempts=2)),
        (_asked(_on(plain, waits), Ask(5.0, cancel=True), Ask(90.0)), Expected(attempts=1)),
        (_asked(_on(plain, waits, Fault(Harm.SCANCEL, 100.0)), Ask(50.0, cancel=True), Ask(90.0)),
         Expected((), 0, JobEnd.CANCELLED)),
        (_on(plain, Lease(4), Fault(Harm.BOSS_KILLED, 20.0, lasts_s=1000.0), Fault(Harm.SCANCEL, 25.0)),
         dataclasses.replace(over, attempts=1)),
    ]  # fmt: skip


def _lost(plain: Night, step: int) -> list[Case]:
    """A node is lost: the first one with the supervisor, or another one."""
    first, other = Fault(Harm.HOST_LOST, step=step), Fault(Harm.HOST_LOST, node=1, step=step)
    unheard = Fault(Harm.SLURMD_LOST, node=1, step=step, lasts_s=500.0)
    lone = dataclasses.replace(plain, nodes=1)
    return [
        (_on(plain, Lease(4), first), Expected((LOST,), 0, hosts=("n1", "n2"), attempts=2, again_s=(19.0, 30.0))),
        (_on(plain, Lease(2), dataclasses.replace(first, lasts_s=30.0)), Expected((LOST,), 0, attempts=2)),
        (_on(plain, Lease(4, spares=1), other), Expected((LOST,), 0, hosts=("n0", "n2"), attempts=2)),
        (_on(plain, Lease(4), other), Expected((LOST,), 1, hosts=("n0", "n2"), avoid=("n1",), attempts=2)),
        (_on(plain, Lease(4), unheard), Expected(attempts=1)),
        (_on(plain, Lease(4, noticed_s=(1.0, 2.0)), unheard, dataclasses.replace(first, step=step + 1)),
         Expected((LOST,), 0, hosts=("n2", "n3"), attempts=2, again_s=(19.9, 30.0))),
        (_on(plain, Lease(4, kill_s=2.0, grace_s=30.0, wait_s=(1.0, 1.0)), unheard,
             Fault(Harm.HANG, rank=plain.ranks, step=step + 1), Fault(Harm.PREEMPTED, step=step + 1)),
         Expected((GONE,), 0, hosts=("n0", "n2"), attempts=2)),
        (_on(lone, Lease(4, spares=1), first), Expected((LOST,), 0, attempts=2)),
    ]  # fmt: skip


def _between_two(plain: Night, step: int) -> list[Case]:
    """What is left of one allocation in the next: a gang that is whole, words that come late, a grace to the end."""
    long = dataclasses.replace(plain, steps=400)
    harms = [(Harm.SLURMD_LOST, 1), (Harm.CUT_BOTH, 1), (Harm.SLURMD_LOST, 0), (Harm.CUT_BOTH, 0)]
    lost = [Fault(harm, node=node, step=step, lasts_s=600.0) for harm, node in harms]
    again = Fault(Harm.REQUEUED, step=step)
    tells = Lease(4, kill_s=12.0, grace_s=20.0, tells=True)
    return [
        (_on(long, Lease(4, wait_s=(1.0, 1.0)), *lost),
         Expected((LOST,), 0, hosts=("n2", "n3"), attempts=2, again_s=(19.9, 30.0))),
        (_on(plain, Lease(4, kill_s=KILL_S), Fault(Harm.LATE_WORD, 10.0), again),
         Expected((GONE,), 1, attempts=2, saved=True)),
        (_on(plain, tells, Fault(Harm.HANG, 19.0), Fault(Harm.REQUEUED, 20.0)), Expected((GONE,), attempts=2)),
    ]  # fmt: skip


def _unusable(plain: Night) -> list[Case]:
    """No agent can be started on some nodes, or they cannot reach the others."""
    apart = dataclasses.replace(plain, hosts=Hosts(4, nets=("a", "z", "a", "a")))
    return [
        (_on(plain, Lease(4), bad=(1,)), Expected((LAUNCH,), 1, hosts=("n0", "n2"), avoid=("n1",))),
        (_on(plain, Lease(4, spares=1), bad=(1,)), Expected((), 0, hosts=("n0", "n2"))),
        (_on(plain, Lease(4), bad=(0, 1, 2, 3)), Expected((LAUNCH,) * 4, 3, JobEnd.FAILED, avoid=("n0", "n1", "n2", "n3"))),
        (dataclasses.replace(apart, lease=Lease(4)),
         Expected((VerdictKind.RENDEZVOUS, LAUNCH), 1, hosts=("n0", "n2"), avoid=("n1",))),
    ]  # fmt: skip


def _on(night: Night, lease: Lease, *faults: Fault, bad: tuple[int, ...] = ()) -> Night:
    hosts = Hosts(lease.count, lease.spares, bad=bad)
    return dataclasses.replace(night, lease=lease, hosts=hosts, faults=faults)


def _asked(night: Night, *asks: Ask) -> Night:
    return dataclasses.replace(night, asks=asks)


def check_queue(world: World, expected: Expected) -> None:
    """Compare a lived night with what is expected of it. Raises Violation."""
    ledger = world.ledger
    told = [what for _, what in ledger.notes if not isinstance(what, str)]
    judged = [what for what in told if isinstance(what, d.Judge)]
    places = [what for what in told if isinstance(what, d.Place)]
    requeues = [what for what in told if isinstance(what, d.Requeue)]
    begun = [what for what in told if isinstance(what, d.BeginAttempt)]
    _must(ledger.end is not None and ledger.end.end is expected.end, f"ended: {ledger.end}")
    kinds = tuple(what.verdict.kind for what in judged)
    _must(kinds == expected.verdicts, f"verdicts {expected.verdicts} wanted: {kinds}")
    _must(len(requeues) == expected.requeues, f"{expected.requeues} requeues wanted: {requeues}")
    _must(expected.attempts in (None, len(begun)), f"{expected.attempts} attempts wanted: {len(begun)}")
    avoided = tuple(sorted({name for what in requeues for name in what.avoid}))
    _must(avoided == expected.avoid, f"{expected.avoid} to be avoided: {avoided}")
    if expected.hosts is not None:
        last = tuple(name for name, _ in places[-1].nodes)
        _must(last == expected.hosts, f"at last on {expected.hosts} wanted: {last}")
    if expected.saved is not None:
        resume = begun[1].resume
        saved = resume is not None and (resume.step or 0) >= (judged[0].verdict.step or 0) - 1
        _must(saved == expected.saved, f"resumed from {resume}")
    if judged and len(begun) > 1:
        waited_s = begun[1].at - judged[0].at
        _must(expected.again_s[0] <= waited_s <= expected.again_s[1], f"{waited_s:.1f} s to the next attempt")
    began = [what for what in told if isinstance(what, e.AllocationBegan)]
    if expected.saved:
        placed_s = places[-1].at - began[-1].at
        _must(placed_s <= PLACED_S_MAX, f"{placed_s:.1f} s until ranks had nodes again")
    _must(len({what.allocation for what in began}) == len(began), f"an allocation began twice: {began}")


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)
