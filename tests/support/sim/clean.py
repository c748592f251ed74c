"""What must the verdict say when exactly one thing went wrong? One night for each fault, and what is expected of it."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from orchestrator.brain.model.decisions import JobEnd, VerdictKind

from .ledger import Violation
from .night import Fault, Harm, Night, limits_of
from .world import World


@dataclass(frozen=True, slots=True)
class Expected:
    """The first verdict; `rank` and `node` where they must be named. No kind: there must be no verdict at all.

    `within_s`: how long after the fault the verdict may come; `nobody`: it must name no rank;
    `says`: what its summary must hold.
    """

    kind: VerdictKind | None
    rank: int | None = None
    node: str = ""
    within_s: float = 5.0
    last: VerdictKind | None = None
    end: JobEnd = JobEnd.SUCCEEDED
    nobody: bool = False
    says: str = ""


def clean_night(seed: int) -> tuple[Night, Expected]:
    """Return a night with one fault at a step of the first attempt, and what the verdict must be."""
    rng = random.Random(seed)
    nodes, ranks = rng.choice(((1, 2), (2, 1), (2, 2), (3, 2), (4, 1)))
    rank = rng.randrange(nodes * ranks)
    step = rng.choice([step for step in range(2, 30) if step % 10])  # at a checkpoint's step nothing comes again
    plain = Night(
        seed,
        nodes,
        ranks,
        limits_of(),
        steps=40,
        local=True,
        start_s=(2.0, 4.0),
        says_ended=rng.random() < 0.5,
    )
    cases = [*_broken(plain, step, rank), *_harmless(plain, step, rank, rng), *_hopeless(plain, step, rank)]
    return cases[seed % len(cases)]


def _broken(plain: Night, step: int, rank: int) -> list[tuple[Night, Expected]]:
    """Something breaks once; the next attempt ends well."""
    node = f"n{rank // plain.ranks}"
    crash = Expected(VerdictKind.CRASH, rank, node)
    slow = dataclasses.replace(plain, limits=limits_of(start_timeout_s=150.0))  # the host has yet to boot
    return [
        (_with(plain, Harm.CRASH, step, rank), crash),
        (_with(plain, Harm.SIGNAL, step, rank), crash),
        (_with(plain, Harm.OOM, step, rank), dataclasses.replace(crash, kind=VerdictKind.OOM)),
        (_with(plain, Harm.STOPPED, step, rank), Expected(VerdictKind.HANG, rank, node, 14.0)),
        (_with(plain, Harm.STOPPED, step, rank, 4.0), Expected(None)),
        (_with(plain, Harm.HANG, step, rank), Expected(VerdictKind.HANG, None, "", 41.0)),
        (_with(plain, Harm.AGENT_KILLED, step, rank), Expected(VerdictKind.NODE_LOST, None, node)),
        (_with(plain, Harm.KEEPER_KILLED, step, rank), Expected(VerdictKind.NODE_LOST, None, node)),
        (_with(slow, Harm.HOST_LOST, step, rank, 30.0, local=False), Expected(VerdictKind.NODE_LOST, None, node, 25.0)),
    ]  # fmt: skip


def _harmless(plain: Night, step: int, rank: int, rng: random.Random) -> list[tuple[Night, Expected]]:
    """Nothing breaks that the gang would notice for long."""
    short = rng.uniform(1.0, 15.0)
    # Longer than silence may last: the steps of the others speak for a node that is cut off.
    cut_s = short if plain.nodes == 1 else rng.uniform(1.0, 28.0)
    cut_early = Fault(Harm.CUT_BOTH, rng.uniform(1.0, 4.0), rank // plain.ranks, 0, short)
    return [
        (_with(plain, Harm.CUT_BOTH, step, rank, cut_s), Expected(None)),
        (_with(plain, Harm.CUT_UP, step, rank, cut_s), Expected(None)),
        (_with(plain, Harm.CUT_DOWN, step, rank, cut_s), Expected(None)),
        (_with(plain, Harm.CUT_ALL, step, rank, min(short, 9.0)), Expected(None)),
        (_with(plain, Harm.CUT_GANG, step, rank, 10.0), Expected(None)),
        (_with(plain, Harm.LINE_RESET, step, rank), Expected(None)),
        (_with(plain, Harm.BOSS_KILLED, step, rank, rng.uniform(0.0, 100.0)), Expected(None)),
        (_with(plain, Harm.SLEPT, step, rank, rng.uniform(0.0, 1000.0)), Expected(None)),
        (plain, Expected(None)),
        (dataclasses.replace(plain, faults=(cut_early,)), Expected(None)),
    ]  # fmt: skip


def _hopeless(plain: Night, step: int, rank: int) -> list[tuple[Night, Expected]]:
    """What goes wrong goes wrong again, or must not be tried again."""
    node = f"n{rank // plain.ranks}"
    crash = Expected(VerdictKind.CRASH, rank, node)
    return [
        (
            dataclasses.replace(plain, limits=limits_of(time_limit_s=20.0)),
            Expected(VerdictKind.TIME_LIMIT, end=JobEnd.FAILED),
        ),
        (
            dataclasses.replace(plain, crash_step=step, crash_rank=rank),
            dataclasses.replace(crash, end=JobEnd.FAILED, last=VerdictKind.NO_PROGRESS),
        ),
        (
            dataclasses.replace(plain, syntax_error=True),
            Expected(VerdictKind.CRASH, None, "", end=JobEnd.FAILED),
        ),
        (dataclasses.replace(plain, setup_fails=9), Expected(VerdictKind.LAUNCH, None, "n0", end=JobEnd.FAILED)),
        (dataclasses.replace(plain, launch_fails=9), Expected(VerdictKind.LAUNCH, None, "n0", end=JobEnd.FAILED)),
        (_with(plain, Harm.EXIT_EARLY, step, rank), crash),
    ]  # fmt: skip


def _with(
    night: Night, harm: Harm, step: int, rank: int, lasts_s: float = float("inf"), *, local: bool = True
) -> Night:
    fault = Fault(harm, 0.0, rank // night.ranks, rank, lasts_s, step)
    return dataclasses.replace(night, faults=(fault,), local=local, calm_s=200.0)


def check_clean(world: World, expected: Expected) -> None:
    """Compare a lived night with what is expected of it. Raises Violation."""
    verdicts = [attempt.verdict for attempt in world.ledger.tries if attempt.verdict is not None]
    _must(world.ledger.end is not None and world.ledger.end.end is expected.end, f"ended: {world.ledger.end}")
    if expected.kind is None:
        _must(not verdicts and len(world.ledger.tries) == 1, f"nothing broke, but: {verdicts}")
        return
    _must(bool(verdicts), "something broke, but no verdict fell")
    first = verdicts[0]
    _must(first.kind is expected.kind, f"{expected.kind} wanted: {first}")
    _must(expected.rank is None or first.ranks == (expected.rank,), f"rank {expected.rank} wanted: {first}")
    _must(expected.says in first.summary, f"{expected.says!r} wanted: {first}")
    _must(not expected.nobody or not first.ranks, f"nobody is to be named: {first}")
    _must(not expected.node or first.node == expected.node, f"node {expected.node} wanted: {first}")
    _must(expected.last in (None, verdicts[-1].kind), f"{expected.last} wanted at last: {verdicts[-1]}")
    judged_s = world.ledger.tries[0].judged_s
    if world.struck_s is not None:
        late_s = judged_s - world.struck_s
        _must(late_s <= expected.within_s, f"{late_s:.1f} s from fault to verdict: {first}")
    if expected.end is JobEnd.SUCCEEDED:
        _must(len(world.ledger.tries) == 2, f"one restart was enough: {len(world.ledger.tries)} attempts")


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)
