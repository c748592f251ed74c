"""What must become of a job when one rank skips or adds a collective of the same shape, and what of one whose counts
differ innocently? One night for each."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.decisions import JobEnd, VerdictKind

from .clean import Expected, check_clean
from .ledger import Violation
from .night import OUT_OF_STEP, Ask, Fault, Harm, Naming, Night, limits_of
from .world import World

SEEN_S = 4.0
"""How long a step, its two successors and the beats that tell of them take at most beside the steps themselves."""

JUDGED_S = 10.0
STEPS = 60
LAGS_AT = 80
"""Every so many steps a thread of the script runs collectives, later on some ranks: more steps than are remembered."""

CASES = 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """`step`: when it began, exactly, and since looks tell; `notices`: how often it is said without a verdict."""

    clean: Expected
    step: int | None = None
    notices: int = 0


def desync_night(seed: int) -> tuple[Night, Wanted]:
    """Return a night with one rank out of step, or none, and what must be said of it."""
    rng = random.Random(seed)
    nodes, ranks = rng.choice(((2, 2), (3, 1), (3, 2), (4, 1)))
    step_s = rng.choice((0.4, 1.0, 2.0))
    rank, step = rng.randrange(nodes * ranks), rng.choice([step for step in range(16, 38) if step % 5])
    plain = Night(
        seed, nodes, ranks, limits_of(), steps=STEPS, step_s=step_s, save_steps=5, start_s=(2.0, 4.0), calm_s=600.0,
        says_ended=rng.random() < 0.5, naming=rng.choice((Naming.ITS_OWN, Naming.STEP)),
    )  # fmt: skip
    cases = [*_odd(plain, rank, step), *_resumed(plain, rank, step), *_innocent(plain, rank, step)]
    cases += _probed(plain, rank, step)
    sends = dataclasses.replace(_with(plain, Harm.ADDS_ONE, rank, step), sends=True)
    cases.append((sends, Wanted(Expected(None))))
    assert len(cases) == CASES
    return cases[seed % CASES]


def _odd(plain: Night, rank: int, step: int) -> list[tuple[Night, Wanted]]:
    node = f"n{rank // plain.ranks}"
    within_s = 3 * max(plain.step_s, 2.0) + SEEN_S + JUDGED_S
    judged = Wanted(Expected(VerdictKind.DESYNC, rank, node, within_s, end=JobEnd.FAILED), step + 1)
    two = dataclasses.replace(plain, nodes=2, ranks=1)
    said = dataclasses.replace(plain, limits=limits_of(on_desync="notify"))
    noticed = Wanted(Expected(None), step + 1, 1)
    both = dataclasses.replace(plain, limits=limits_of(on_desync="notify", on_hang="notify"))
    cut = Fault(Harm.CUT_GANG, step=step + 14, lasts_s=75.0)
    early = Fault(Harm.BOSS_KILLED, step=3)
    # The next supervisor sees them agree before
    slow = dataclasses.replace(plain, step_s=max(plain.step_s, 1.0))
    return [
        *((_with(plain, harm, rank, step), judged) for harm in OUT_OF_STEP),
        *((_with(said, harm, rank, step), noticed) for harm in OUT_OF_STEP),
        (
            _with(two, Harm.SKIPS_ONE, rank % 2, step),
            dataclasses.replace(judged, clean=dataclasses.replace(judged.clean, rank=rank % 2, node=f"n{rank % 2}")),
        ),
        (_with(slow, Harm.ADDS_ONE, rank, step, dataclasses.replace(early, lasts_s=3.0)), judged),
        (_slow_looks(_with(plain, Harm.SKIPS_ONE, rank, step)), dataclasses.replace(judged, step=None)),
        (_with(both, Harm.SKIPS_ONE, rank, step, cut), dataclasses.replace(noticed, notices=2)),
    ]


def _probed(plain: Night, rank: int, step: int) -> list[tuple[Night, Wanted]]:
    """A rank makes steps of another optimizer, alone: of no matter, also where another one is out of step."""
    odd = (rank + 1) % (plain.nodes * plain.ranks)
    within_s = 3 * max(plain.step_s, 2.0) + SEEN_S + JUDGED_S
    wanted = Wanted(Expected(VerdictKind.DESYNC, odd, f"n{odd // plain.ranks}", within_s, end=JobEnd.FAILED), step + 1)
    night = dataclasses.replace(plain, probe_rank=rank)
    return [(night, Wanted(Expected(None))), (_with(night, Harm.ADDS_ONE, odd, step), wanted)]


def _slow_looks(night: Night) -> Night:
    """The line is so slow that looks come too late to say where it began."""
    return dataclasses.replace(night, look_s=(30.0, 40.0))


def _resumed(plain: Night, rank: int, step: int) -> list[tuple[Night, Wanted]]:
    """The user resumes the job: it begins before the step at which the rank was out of step, whatever names say."""
    node = f"n{rank // plain.ranks}"
    night = dataclasses.replace(_with(plain, Harm.SKIPS_ONE, rank, step), asks=(Ask(300.0),))
    within_s = 3 * max(plain.step_s, 2.0) + SEEN_S + JUDGED_S
    wanted = Wanted(Expected(VerdictKind.DESYNC, rank, node, within_s), step + 1)
    named = [dataclasses.replace(night, naming=naming, late_steps=1) for naming in (Naming.SAVE, Naming.LAST)]
    return [(one, wanted) for one in (night, *named)]


def _innocent(plain: Night, rank: int, step: int) -> list[tuple[Night, Wanted]]:
    """Nothing is out of step: a thread lags behind for some steps, or while no step is made; nobody has seen it agree."""
    none = Wanted(Expected(None))
    lags = dataclasses.replace(plain, steps=3 * LAGS_AT, thread_saves_steps=LAGS_AT, step_s=1.0)
    pause = Fault(Harm.EVALUATES, rank=rank, step=LAGS_AT + 5, lasts_s=100.0)
    auto = limits_of(hang_timeout_s=0.0)
    unseen = Fault(Harm.BOSS_KILLED, step=step - 3, lasts_s=20.0)
    return [
        (plain, none),
        (lags, none),
        (dataclasses.replace(lags, limits=auto, faults=(pause,)), none),
        (_with(plain, Harm.SKIPS_ONE, rank, step, unseen), none),
        (dataclasses.replace(plain, thread_saves_steps=5), none),
        (_with(plain, Harm.ADDS_ONE, rank, step, Fault(Harm.SLEPT, step=step, lasts_s=100.0)), none),
    ]


def _with(night: Night, harm: Harm, rank: int, step: int, *more: Fault) -> Night:
    fault = Fault(harm, rank=rank, step=step)
    return dataclasses.replace(night, faults=(*more, fault))


def check_desync(world: World, wanted: Wanted) -> None:
    """Compare a lived night with what is expected of it. Raises Violation."""
    check_clean(world, wanted.clean)
    said = [what for _, what in world.ledger.notes if isinstance(what, (d.Notice, d.Judge))]
    found = [one.verdict for one in said if one.verdict is not None and one.verdict.kind is VerdictKind.DESYNC]
    notices = sum(isinstance(what, d.Notice) and what.verdict is not None for what in said)
    if notices != wanted.notices:
        raise Violation(f"{wanted.notices} notices wanted, not {notices}: {found}")
    if wanted.step is not None and [verdict.step for verdict in found] != [wanted.step]:
        raise Violation(f"it began at step {wanted.step}: {found}")
