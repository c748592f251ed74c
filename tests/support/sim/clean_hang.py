"""What must become of a job whose silence is judged by what it has shown when one rank stands still? One night for each
way to hang, with its culprit and its limit, and one for each innocent pause."""

from __future__ import annotations

import dataclasses
import random

from orchestrator.brain.model.decisions import VerdictKind

from .clean import Expected
from .night import ENDLESS, INNOCENT, Fault, Harm, Night, limits_of

SURE_S = 14.0
"""From a hang to its verdict where a state proves it: 5 s of silence, a second look 2 s later, beats each 2 s, and
answers that take up to 1.5 s."""

UNSURE_S = 320.0
"""The same where no state proves it, and others wait for as long as torch lets them, `Night.limit_s`."""

IDLE_S = 1_830.0
"""The same where no rank is seen to wait."""

SLOW_STEP_S = 4.0
CASES = 39


def hang_night(seed: int) -> tuple[Night, Expected]:
    """Return a night with one fault, or one pause, and what the verdict must be."""
    rng = random.Random(seed)
    nodes, ranks = rng.choice(((2, 1), (2, 2), (3, 2), (4, 1)))
    rank, step = rng.randrange(nodes * ranks), rng.choice([step for step in range(12, 29) if step % 10])
    plain = Night(
        seed, nodes, ranks, limits_of(hang_timeout_s=0.0), steps=40, start_s=(2.0, 4.0), says_ended=rng.random() < 0.5,
        calm_s=300.0,
    )  # fmt: skip
    lasts_s = rng.uniform(1.0, 50.0)
    cases = [*_endless(plain, step, rank), *_pauses(plain, step, rank, lasts_s), *_others(plain, step, rank)]
    assert len(cases) == CASES
    return cases[seed % CASES]


def _endless(plain: Night, step: int, rank: int) -> list[tuple[Night, Expected]]:
    node = f"n{rank // plain.ranks}"
    if plain.nodes * plain.ranks == 2:  # of two that differ nobody knows which one is wrong
        plain = dataclasses.replace(plain, nodes=3)
    sure = Expected(VerdictKind.HANG, rank, node, SURE_S)
    unproved = (Harm.STUCK, Harm.STUCK_AND_LOGS, Harm.SPINS, Harm.SLEEPS, Harm.ELSEWHERE, Harm.HANG)
    unsure = dataclasses.replace(sure, within_s=UNSURE_S)
    return [(_with(plain, harm, step, rank), unsure if harm in unproved else sure) for harm in (*ENDLESS, Harm.HANG)]


def _pauses(plain: Night, step: int, rank: int, lasts_s: float) -> list[tuple[Night, Expected]]:
    """What ends by itself is never judged; it may last longer where it can be seen for what it is."""
    short = [(_with(plain, harm, step, rank, lasts_s), Expected(None)) for harm in INNOCENT]
    long = [
        (_with(plain, Harm.EVALUATES, step, rank, 2000.0), Expected(None)),
        (_with(plain, Harm.EVALUATES_AND_LOGS, step, rank, 900.0), Expected(None)),
        (_with(plain, Harm.SAVES, step, rank, 280.0), Expected(None)),
        (_with(plain, Harm.LONG_STEP, step, rank, 280.0), Expected(None)),
        (_with(plain, Harm.NAPS, step, rank, 280.0), Expected(None)),
        (_with(plain, Harm.SYNCS_BESIDE, step, rank, 280.0), Expected(None)),
    ]
    slow = dataclasses.replace(
        plain, start_s=(100.0, 200.0), limits=limits_of(hang_timeout_s=0.0, start_timeout_s=300.0)
    )
    return [
        *short,
        *long,
        (slow, Expected(None)),
        (_with(plain, Harm.STOPPED, step, rank, 4.0), Expected(None)),
    ]


def _others(plain: Night, step: int, rank: int) -> list[tuple[Night, Expected]]:
    node = f"n{rank // plain.ranks}"
    slow = dataclasses.replace(_with(plain, Harm.STUCK, step, rank), step_s=SLOW_STEP_S)
    served_s = UNSURE_S if plain.nodes * plain.ranks > 2 else IDLE_S  # of two, the other one waits for none
    cut = Expected(VerdictKind.HANG, None, "", UNSURE_S, nobody=True)
    return [
        (slow, Expected(VerdictKind.HANG, rank, node, 3 * SLOW_STEP_S + UNSURE_S)),
        (_with(plain, Harm.CUT_GANG, step, rank, 280.0), Expected(None)),
        (_with(plain, Harm.CUT_GANG, step, rank, 400.0), cut),
        (
            dataclasses.replace(plain, stays_rank=rank),
            Expected(VerdictKind.HANG, rank, node, IDLE_S, says="has finished its script"),
        ),
        (
            dataclasses.replace(_with(plain, Harm.EXIT_EARLY, step, rank), peers_hang=1.0),
            Expected(VerdictKind.HANG, rank, node, SURE_S + 5.0),
        ),
        (_with(plain, Harm.STOPPED, step, rank), Expected(VerdictKind.HANG, rank, node, SURE_S)),
        (_served(plain, Harm.NAPS, step, rank, 30.0), Expected(None)),
        (_served(plain, Harm.STUCK, step, rank), Expected(VerdictKind.HANG, rank, node, served_s)),
        (_polled(plain, Harm.NAPS, step, rank, 30.0), Expected(None)),
        (_polled(plain, Harm.STUCK, step, rank), Expected(VerdictKind.HANG, rank, node, IDLE_S)),
        (_all_nap(plain, step, 2000.0), Expected(None)),
        (_helped(plain, step, rank, 25.0), Expected(None)),
        (_late(plain, rank, 0.0), Expected(VerdictKind.RENDEZVOUS, rank, node)),
        (_late(plain, rank, 85.0), Expected(VerdictKind.RENDEZVOUS, rank, node)),
        (_late(plain, rank, float("inf")), Expected(VerdictKind.RENDEZVOUS, says="have not joined")),
        (_unstepped(plain, Harm.STUCK_AND_LOGS, rank), Expected(VerdictKind.HANG, rank, node, UNSURE_S)),
        (_unstepped(plain, Harm.STOPPED, rank), Expected(VerdictKind.HANG, rank, node, SURE_S)),
        (_looked_late(plain, step, rank), Expected(VerdictKind.HANG, rank, node, UNSURE_S + 30.0)),
    ]


def _looked_late(night: Night, step: int, rank: int) -> Night:
    """Return a night in which answers to an inspection often come after the next one."""
    night = dataclasses.replace(night, nodes=max(night.nodes, 3))
    return dataclasses.replace(_with(night, Harm.STUCK, step, rank), look_s=(1.0, 12.0))


def _unstepped(night: Night, harm: Harm, rank: int) -> Night:
    """Return a night in which a rank comes to stand before the first step."""
    stuck = Fault(harm, 60.0, rank // night.ranks, rank)
    return dataclasses.replace(night, step_s=70.0, steps=4, faults=(stuck,))


def _served(plain: Night, harm: Harm, step: int, rank: int, lasts_s: float = float("inf")) -> Night:
    """Return a night in which the next rank does nothing but wait for what the others ask of it."""
    night = _with(plain, harm, step, rank, lasts_s)
    return dataclasses.replace(night, serves_rank=(rank + 1) % (plain.nodes * plain.ranks))


def _late(night: Night, rank: int, hidden_s: float) -> Night:
    """Return a night in which a rank does not come to the rendezvous, and looks see the next one late, which has come."""
    limits = limits_of(hang_timeout_s=0.0, start_timeout_s=300.0, rendezvous_timeout_s=60.0)
    night = dataclasses.replace(night, nodes=max(night.nodes, 3))  # somebody is seen to wait
    hidden = (rank + 1) % (night.nodes * night.ranks)
    return dataclasses.replace(night, limits=limits, late_rank=rank, hidden_rank=hidden, hidden_s=hidden_s)


def _all_nap(night: Night, step: int, lasts_s: float) -> Night:
    """Return a night in which all ranks sleep at once: nobody waits for another."""
    naps = (Fault(Harm.NAPS, 0.0, n // night.ranks, n, lasts_s, step) for n in range(night.nodes * night.ranks))
    return dataclasses.replace(night, faults=tuple(naps))


def _helped(night: Night, step: int, rank: int, lasts_s: float) -> Night:
    """Return a night in which a rank reads what nobody writes, until the next rank, which works first, does so."""
    helper = (rank + 1) % (night.nodes * night.ranks)
    stuck = Fault(Harm.STUCK, 0.0, rank // night.ranks, rank, lasts_s, step)
    return dataclasses.replace(
        night, faults=(stuck, Fault(Harm.NAPS, 0.0, helper // night.ranks, helper, lasts_s, step))
    )


def _polled(plain: Night, harm: Harm, step: int, rank: int, lasts_s: float = float("inf")) -> Night:
    """Return a night in which ranks wait for each other in loops of their own."""
    return dataclasses.replace(_with(plain, harm, step, rank, lasts_s), polls=True)


def _with(night: Night, harm: Harm, step: int, rank: int, lasts_s: float = float("inf")) -> Night:
    return dataclasses.replace(night, faults=(Fault(harm, 0.0, rank // night.ranks, rank, lasts_s, step),))
