"""What becomes of a job on a pool of hosts when exactly one thing is wrong? One night for each, and what is expected."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.decisions import JobEnd, VerdictKind
from orchestrator.core.wire import orders
from orchestrator.journal.journal_file import unwrap_message

from .ledger import Violation
from .night import Fault, Harm, Night, limits_of
from .pool import FOR_EVER_S, Busy, Hosts
from .savedesk import ROOT
from .world import World

LOST_S_MAX = 10.0
"""From the verdict on a lost host, whose agent has surely stopped its ranks, to the next placement."""


LATER = 84
"""The first seed of the cases that were thought of later, so that the others keep theirs."""


@dataclass(frozen=True, slots=True)
class Expected:
    """All verdicts with the node that they name, and the hosts at last. `None` and inf: not asked.

    `again_s`: how long after the first verdict ranks have places again; `first_s`: when they first get them.
    """

    hosts: tuple[str, ...]
    verdicts: tuple[tuple[VerdictKind, str], ...] = ()
    end: JobEnd = JobEnd.SUCCEEDED
    again_s: float = FOR_EVER_S
    first_s: tuple[float, float] = (0.0, 30.0)
    launches: int | None = None
    launches_max: float = FOR_EVER_S
    resume: str | None = None


Case = tuple[Night, Expected]
BOTH, NEXT = ("n0", "n1"), ("n0", "n2")
LOST = (VerdictKind.NODE_LOST, "n1")


def pool_night(seed: int) -> Case:
    """Return a night on a pool with one thing wrong, and what is to come of it."""
    rng = random.Random(seed)
    step = rng.choice([step for step in range(12, 28) if step % 10 not in (0, 1)])
    plain = Night(
        seed, 2, rng.choice((1, 2)), limits_of(), steps=40, local=False, start_s=(2.0, 4.0), calm_s=300.0,
        says_ended=rng.random() < 0.5,
    )  # fmt: skip
    cases = [
        *_lost(plain, step),
        *_unusable(plain, step),
        *_others(plain),
        *_apart(plain),
        *_ways_home(plain, step),
    ]
    later = {LATER: _slow, LATER + 1: _stuck, LATER + 2: _boots}
    if seed in later:
        return later[seed](plain)
    sick = _sick(plain, step)
    first = LATER + len(later)
    return sick[seed - first] if first <= seed < first + len(sick) else cases[seed % len(cases)]


def _lost(plain: Night, step: int) -> list[Case]:
    """A host is lost, or seems so; a spare, another host, or nobody takes its place."""
    gone = Fault(Harm.HOST_LOST, node=1, step=step)
    back = dataclasses.replace(gone, lasts_s=30.0)
    later = Fault(Harm.HOST_LOST, 110.0, 2)
    instead = Expected(NEXT, (LOST,), again_s=LOST_S_MAX)
    long = dataclasses.replace(plain, step_s=10.0)
    apart = [Fault(harm, node=1, step=step, lasts_s=80.0) for harm in (Harm.CUT_BOTH, Harm.CUT_GANG)]
    cut = Fault(Harm.CUT_ALL, 20.0, lasts_s=8.0)
    return [
        (_on(plain, Hosts(4, spares=1), gone), instead),
        (_on(plain, Hosts(3), gone), instead),
        (_on(plain, Hosts(2), gone), Expected(BOTH, (LOST, LOST), JobEnd.FAILED)),
        (_on(plain, Hosts(2), back), Expected(BOTH, (LOST,))),
        (_on(plain, Hosts(2), Fault(Harm.KEY_CHANGED, 10.0, 1), back), Expected(BOTH, (LOST, LOST), JobEnd.FAILED)),
        (_on(plain, Hosts(3), Fault(Harm.KEY_CHANGED, 10.0, 1), back), instead),
        (_on(long, Hosts(3, spares=1), dataclasses.replace(gone, lasts_s=70.0)), instead),
        (_on(long, Hosts(3), *apart), instead),
        (_on(long, Hosts(4, spares=1), Fault(Harm.HOST_LOST, 60.0, 2)), Expected(BOTH, launches_max=20)),
        (_on(long, Hosts(3), Fault(Harm.HOST_LOST, 0.0, 0, lasts_s=100.0), later),
         Expected(("n1", "n0"), ((VerdictKind.NODE_LOST, "n2"),))),
        (_on(plain, Hosts(6, spares=1), cut), Expected(BOTH, launches=3)),
        (_on(plain, Hosts(6, spares=1), Fault(Harm.BOSS_KILLED, step=step, lasts_s=30.0)), Expected(BOTH, launches=3)),
        (_on(plain, Hosts(4, spares=1), Fault(Harm.SLEPT, step=step, lasts_s=3600.0)), Expected(BOTH, launches=3)),
        (_on(plain, Hosts(4, spares=1), Fault(Harm.CRASH, step=step, rank=plain.ranks)),
         Expected(BOTH, ((VerdictKind.CRASH, "n1"),), again_s=5.0, launches=3)),
    ]  # fmt: skip


def _unusable(plain: Night, step: int) -> list[Case]:
    """Hosts refuse, or the setup fails there."""
    wide = dataclasses.replace(plain, nodes=1)
    return [
        (_on(plain, Hosts(4, bad=(0, 2))), Expected(("n1", "n3"), launches=4)),
        (
            _on(plain, Hosts(4, bad=(0, 1, 2, 3))),
            Expected((), ((VerdictKind.LAUNCH, ""),), JobEnd.FAILED, launches=4),
        ),
        (_on(plain, Hosts(3, bad=(0, 1))), Expected((), ((VerdictKind.LAUNCH, ""),), JobEnd.FAILED)),
        (_on(plain, Hosts(3, unfit=(1,))), Expected(NEXT, ((VerdictKind.LAUNCH, "n1"),), again_s=10.0)),
        (
            _on(wide, Hosts(2, spares=1, unfit=(0,))),
            Expected(("n1",), ((VerdictKind.LAUNCH, "n0"),), again_s=5.0),
        ),
        (dataclasses.replace(_on(plain, Hosts(2)), launch_fails=2), Expected(BOTH, launches=4)),
        (dataclasses.replace(_on(plain, Hosts(3)), launch_fails=9), Expected(("n1", "n2"))),
    ]


def _others(plain: Night) -> list[Case]:
    """Other jobs use hosts, or came first."""
    busy = (Busy(1, 0.0, 100.0),)
    turns = tuple(Busy(turn % 2, turn * 8.0, turn * 8.0 + 8.0) for turn in range(15))
    apart = tuple(Busy(host, 0.0, 60.0 if host > 4 else 400.0) for host in range(1, 7))
    # Neither the time for a start nor that for the whole job has begun while the job waits.
    tight = dataclasses.replace(plain, limits=limits_of(start_timeout_s=40.0, time_limit_s=90.0))
    long = dataclasses.replace(plain, step_s=15.0)
    lost = Fault(Harm.HOST_LOST, node=1, step=14)
    taken = (Busy(1, 30.0, 400.0),)
    off, killed = Fault(Harm.HOST_LOST, 12.0, 2), Fault(Harm.KEEPER_KILLED, 35.0, 1)
    return [
        (_on(plain, Hosts(3, spares=1, busy=taken), off, killed), Expected(BOTH, (LOST,))),
        (_on(tight, Hosts(2, busy=busy)), Expected(BOTH, first_s=(100.0, 115.0))),
        (_on(tight, Hosts(3, busy=busy)), Expected(NEXT)),
        (_on(tight, Hosts(2, ahead=(20.0, 90.0))), Expected(BOTH, first_s=(90.0, 95.0), launches=2)),
        (_on(dataclasses.replace(plain, latency_s=(2.0, 2.5)), Hosts(2, busy=(Busy(1, 0.0, 12.0),))), Expected(BOTH)),
        (_on(tight, Hosts(2, busy=turns)), Expected(BOTH, first_s=(4.0, 140.0))),
        (_on(dataclasses.replace(plain, nodes=3), Hosts(7, busy=apart)),
         Expected(("n0", "n5", "n6"), first_s=(60.0, 80.0))),
        (_on(long, Hosts(3, spares=1, busy=(Busy(2, 0.0, FOR_EVER_S),))), Expected(BOTH, launches_max=70)),
        (_on(plain, Hosts(3, busy=(Busy(2, 0.0, 150.0),)), lost), Expected(NEXT, (LOST,), again_s=150.0)),
    ]  # fmt: skip


def _apart(plain: Night) -> list[Case]:
    """Hosts do not reach one another everywhere."""
    three = dataclasses.replace(plain, nodes=3)
    return [
        (_on(plain, Hosts(3, bridge=True)), Expected(BOTH)),
        (_on(three, Hosts(3, nets=("ab", "b", "ab"), bridge=True)), Expected(("n0", "n1", "n2"))),
        (_on(plain, Hosts(3, nets=("a", "z", "a"))), Expected(NEXT, ((VerdictKind.RENDEZVOUS, "n1"),), again_s=10.0)),
        (_on(three, Hosts(4, nets=("z", "a", "a", "a"))),
         Expected(("n3", "n1", "n2"), ((VerdictKind.RENDEZVOUS, "n0"),), again_s=10.0)),
        (_on(plain, Hosts(4, nets=("z", "a", "a", "a"))),
         Expected(("n1", "n2"), ((VerdictKind.RENDEZVOUS, "n1"), (VerdictKind.RENDEZVOUS, "n0")))),
        (_on(plain, Hosts(2, nets=("z", "a"))), Expected(BOTH, ((VerdictKind.RENDEZVOUS, "n1"), *((VerdictKind.RENDEZVOUS, "n0"),) * 3), JobEnd.FAILED)),
        (_on(three, Hosts(3, nets=("ab", "a", "b"))),
         Expected(("n0", "n1", "n2"), ((VerdictKind.RENDEZVOUS, "n1"),) * 4, JobEnd.FAILED)),
    ]  # fmt: skip


def _ways_home(plain: Night, step: int) -> list[Case]:
    """Checkpoints lie on hosts, and come home in their time."""
    crash = Fault(Harm.CRASH, step=12, rank=1)
    lost = Fault(Harm.HOST_LOST, node=0, step=step)
    cancel = dataclasses.replace(plain, limits=limits_of(time_limit_s=17.0))
    broken = (VerdictKind.CRASH, "n1" if plain.ranks == 1 else "n0")
    return [
        (_on(plain, Hosts(2, copy_s=(20.0, 30.0)), crash), Expected(BOTH, (broken,), resume="a1/step-10")),
        (_on(plain, Hosts(2, copy_s=(20.0, 30.0), copies_fail=1.0), crash), Expected(BOTH, (broken,), resume="")),
        (_on(plain, Hosts(2, copy_s=(2000.0, 2500.0)), crash), Expected(BOTH, (broken,), again_s=605.0, resume="")),
        (_on(plain, Hosts(3, copy_s=(100.0, 200.0)), lost),
         Expected(("n2", "n1"), ((VerdictKind.NODE_LOST, "n0"),), again_s=LOST_S_MAX, resume="")),
        (_on(cancel, Hosts(2, copy_s=(20.0, 30.0))),
         Expected(BOTH, ((VerdictKind.TIME_LIMIT, ""),), JobEnd.FAILED)),
    ]  # fmt: skip


def _slow(plain: Night) -> Case:
    """A host swallows its launch; another one is free."""
    return (
        _on(dataclasses.replace(plain, launch_lost=1), Hosts(3)),
        Expected(("n1", "n2"), first_s=(8.0, 20.0)),
    )


def _stuck(plain: Night) -> Case:
    """The setup lines never end on a host; another one is free."""
    return _on(plain, Hosts(3, stuck=(1,))), Expected(NEXT, ((VerdictKind.START_TIMEOUT, "n1"),), again_s=75.0)


def _boots(plain: Night) -> Case:
    """A lost host boots, and shows a key for a while that nobody knows; there is no other host."""
    lost, other_key = (
        Fault(Harm.HOST_LOST, 20.0, 1, lasts_s=25.0),
        Fault(Harm.KEY_CHANGED, 10.0, 1, lasts_s=45.0),
    )
    return _on(plain, Hosts(2), lost, other_key), Expected(BOTH, (LOST,))


def _sick(plain: Night, step: int) -> list[Case]:
    """A GPU of a host is sick, and a rank crashes or hangs there, or elsewhere; another host takes over, or none can."""
    plain = dataclasses.replace(plain, steps=60)
    step += 12  # later than the agent sees the GPU at the latest
    sick, crash = Fault(Harm.GPU_SICK, 0.1, node=1), Fault(Harm.CRASH, step=step, rank=plain.ranks)
    late = dataclasses.replace(sick, step=step)
    hung = Fault(Harm.STOPPED, step=step, rank=plain.ranks)
    elsewhere = Fault(Harm.CRASH, step=step, rank=0)
    judged = ((VerdictKind.CRASH, "n1"),)
    taken = (Busy(2, 0.0, FOR_EVER_S),)
    return [
        (_on(plain, Hosts(3), sick, crash), Expected(NEXT, judged, again_s=10.0)),
        (_on(plain, Hosts(4, spares=1), late, crash), Expected(NEXT, judged, again_s=10.0)),
        (_on(plain, Hosts(4, spares=1), sick, hung), Expected(NEXT, ((VerdictKind.HANG, "n1"),), again_s=10.0)),
        (_on(plain, Hosts(2), sick, crash), Expected(BOTH, judged, again_s=10.0)),
        (_on(plain, Hosts(4, spares=1), sick, elsewhere), Expected(BOTH, ((VerdictKind.CRASH, "n0"),), again_s=10.0)),
        (_on(plain, Hosts(4, spares=1), sick), Expected(BOTH)),
        (_on(plain, Hosts(3, bad=(2,)), sick, crash), Expected(BOTH, judged, again_s=40.0)),
        (_on(plain, Hosts(3, busy=taken), sick, crash), Expected(BOTH, judged, again_s=40.0)),
    ]  # fmt: skip


def _on(night: Night, hosts: Hosts, *faults: Fault) -> Night:
    return dataclasses.replace(night, hosts=hosts, faults=faults, calm_s=max(300.0, hosts.calm_s))


def check_pool(world: World, expected: Expected) -> None:
    """Compare a lived night with what is expected of it. Raises Violation."""
    ledger = world.ledger
    told = [what for _, what in ledger.notes if not isinstance(what, str)]
    judged = [(what.verdict.kind, what.verdict.node) for what in told if isinstance(what, d.Judge)]
    places = [what for what in told if isinstance(what, d.Place)]
    launches = sum(isinstance(what, d.Launch) for what in told)
    _must(ledger.end is not None and ledger.end.end is expected.end, f"ended: {ledger.end}")
    _must(judged == list(expected.verdicts), f"verdicts {expected.verdicts} wanted: {judged}")
    last = tuple(name for name, _ in places[-1].nodes) if places else ()
    _must(last == expected.hosts, f"at last on {expected.hosts} wanted: {last}")
    _must(expected.launches in (None, launches), f"{expected.launches} launches wanted: {launches}")
    _must(launches <= expected.launches_max, f"{launches} launches")
    if places:
        _must(
            expected.first_s[0] <= places[0].at <= expected.first_s[1],
            f"first placed at {places[0].at:.1f} s",
        )
    if expected.again_s < FOR_EVER_S:
        late_s = places[1].at - next(what.at for what in told if isinstance(what, d.Judge))
        told_s = [
            what.contact_timeout_s
            for what in map(unwrap_message, told)
            if isinstance(what, orders.Fence) and what.attempt == 1
        ]
        _must(
            late_s <= expected.again_s + max(told_s, default=0.0),
            f"{late_s:.1f} s from the verdict to the next places",
        )
    if expected.resume is not None:
        resume = ledger.tries[-1].begun.resume
        path = resume.path.removeprefix(f"{ROOT}/") if resume else ""
        _must(path == expected.resume, f"resumed from {resume}")


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)
