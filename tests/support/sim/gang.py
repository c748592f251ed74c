"""How do ranks live and die? A gang steps only while all of its ranks can; its count is computed, not ticked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.agent.ranks.step_counter import PASSES_MIN
from orchestrator.core.observations import Activity, Failure, Framework
from orchestrator.core.status_types import ReportedNumber, Training
from tests.support.frames import frame

from .counts import Counted, fall_out_of_step
from .night import OUT_OF_STEP, Fault, Harm, Naming
from .savedesk import HERE, Written
from .stance import SLEEP_S, Stance

if TYPE_CHECKING:
    from .host import Host
    from .world import World

OWN = Failure("ValueError", "loss is nan", "Traceback ...\nValueError: loss is nan", frame("train.py:42"))
VICTIM = Failure("RuntimeError", "Connection closed by peer [10.0.0.2]:2345", "Traceback ...", frame("train.py:50"))
FATAL = Failure("", "", "Thread ...", frame("train.py:43 load"))
UNLOADABLE = Failure("RuntimeError", "size mismatch for head.weight", "Traceback ...", frame("train.py:12"))
SYNTAX = Failure("SyntaxError", "invalid syntax", "  File train.py, line 3", frame("train.py:3"))

SUMS_TOLD_MAX = 3
"""So many sums of parameters a heartbeat brings."""


@dataclass(slots=True, eq=False)
class Rank:
    """One process. `stands`: it makes no step though it lives (stopped, hung, or done and never leaving)."""

    number: int
    host: Host
    gang: Gang
    pid: int
    ready_s: float
    alive: bool = True
    state: str = "S"
    hung: bool = False
    immortal_until_s: float = 0.0
    stance: Stance | None = None
    ended_well: bool = False
    left: bool = False  # it has said its last word
    polled: int = 0  # the steps of one that waits for others in a loop of its own: it has ended the one they are in
    counted: Counted = field(default_factory=Counted)
    summed: int = 0  # the last step whose sum it has told

    @property
    def stands(self) -> bool:
        return self.hung or self.state == "T" or self.stance is not None

    @property
    def serves(self) -> bool:
        """Tell whether it makes no steps, and the others do not need it for theirs."""
        return self.number == self.gang.world.night.serves_rank

    @property
    def is_silent(self) -> bool:
        """Tell whether it has no collectives."""
        night = self.gang.world.night
        return self.serves or night.polls or night.prints

    @property
    def count(self) -> int:
        """Its steps."""
        return 0 if self.serves or self.gang.world.night.prints else max(self.polled, self.gang.count)

    @property
    def passes(self) -> int:
        """Its backward passes, as an agent tells of them."""
        return self.gang.count if self.gang.world.night.passes and self.gang.count >= PASSES_MIN else 0

    @property
    def alone(self) -> Framework | None:
        """Return what is to form its process group, as long as it has formed none."""
        night, count = self.gang.world.night, self.count
        is_alone = 0 < count <= night.alone_steps and self.number != night.company_rank
        return Framework.TORCH if is_alone else None

    @property
    def training(self) -> Training | None:
        """Return what it prints of its training."""
        last, step = self.gang.world.night.odd_loss[1], self.gang.base + self.count
        loss = ReportedNumber("inf" if self.nonfinite_losses else 1.0 + step / 100)
        return Training(loss) if last and self.count else None

    @property
    def nonfinite_losses(self) -> int:
        """Return how many losses in a row it has last printed that are infinite: one at each step."""
        night, step = self.gang.world.night, self.gang.base + self.count
        first, last = night.odd_loss
        is_odd = self.count and first <= step < last and self.gang.attempt <= night.odd_loss_attempts
        return min(step - first + 1, self.count) if is_odd else 0

    def new_sums(self) -> tuple[tuple[int, ...], ...]:
        """Return the sums of its parameters at the last steps that have one, if it has not told them."""
        night, every = self.gang.world.night, self.gang.world.night.limits.compare_steps
        if not every:
            return ()
        steps = range(self.count // every * every, self.summed, -every)[:SUMS_TOLD_MAX][::-1]
        self.summed, (odd, first) = max((self.summed, *steps)), night.drift
        drifted = {step: self.number == odd and self.gang.base + step >= first for step in steps}
        return tuple(
            (0, step, step, 1000 * step + (self.number if night.holds_shards else drifted[step])) for step in steps
        )

    @property
    def is_stuck(self) -> bool:
        """Tell whether it will never go on, or has been stopped from outside."""
        return self.hung or self.state == "T"

    @property
    def stood_s(self) -> float:
        return self.gang.world.now - self.stance.since_s if self.stance is not None else 0.0

    @property
    def burnt_s(self) -> float:
        """Processor seconds beside those of its steps."""
        return self.stance.cpu * self.stood_s if self.stance is not None else 0.0

    @property
    def logged(self) -> int:
        """Bytes of log beside those of its steps."""
        stood = int(self.stood_s) if self.stance is not None and self.stance.logs else 0
        return stood + (20 * self.gang.count if self.gang.world.night.prints else 0)


@dataclass(slots=True, eq=False)
class Gang:
    """The ranks of one attempt, on all hosts."""

    world: World
    attempt: int
    size: int
    base: int
    call: int = 0
    ranks: dict[int, Rank] = field(default_factory=dict)
    count: int = 0
    since_s: float = 0.0
    stepped_s: float = 0.0
    stepping: bool = False
    broken: bool = False
    finished: bool = False
    exited_well: int = 0
    version: int = 0
    saved_itself: bool = False
    last_save: tuple[str, int, int] | None = None  # its path, the count that its time says, and its bytes

    @property
    def goal(self) -> int:
        """The job's step at which its ranks are done."""
        night = self.world.night
        return night.steps * self.call // night.calls if self.call else night.steps

    @property
    def is_stuck(self) -> bool:
        """Tell whether something keeps the gang from going on that does not end by itself, or that looks like it."""
        ranks = self.ranks.values()
        return any(not rank.alive or rank.is_stuck or rank.host.cut_gang for rank in ranks) or self.broken

    def settle(self) -> None:
        """Bring the count up to now."""
        if not self.stepping:
            return
        step_s = self.world.night.step_s
        made = int((self.world.now - self.since_s) / step_s + 1e-9)
        if made:
            self.count += made
            self.since_s += made * step_s
            self.stepped_s = self.since_s

    def review(self) -> None:
        """See anew whether the gang can step; called whenever something changes for one of its ranks."""
        self.settle()
        able = self._able()
        if able and not self.stepping:
            self.since_s = self.world.now
        self.stepping = able
        self.version += 1
        if self.world.night.polls and self.count and any(rank.stands for rank in self.ranks.values()):
            for rank in self.ranks.values():
                rank.polled = rank.polled if rank.stands else self.count + 1
        if able:
            next_count = min(self._milestones())
            at_s = self.since_s + (next_count - self.count) * self.world.night.step_s
            self.world.at(at_s, self._reached, self.version, next_count)

    def _able(self) -> bool:
        if len(self.ranks) < self.size or self.finished:
            return False
        now = self.world.now + 1e-9
        return all(
            rank.alive and not rank.stands and rank.ready_s <= now and not rank.host.cut_gang
            for rank in self.ranks.values()
        )

    def _milestones(self) -> list[int]:
        night = self.world.night
        marks = [
            max(self.goal - self.base, self.count),
            (self.count // night.save_steps + 1) * night.save_steps,
        ]
        if night.crash_step - self.base > self.count:
            marks.append(night.crash_step - self.base)
        marks += [fault.step for fault in self.world.step_faults if fault.step > self.count and self.attempt == 1]
        return marks

    def _reached(self, version: int, count: int) -> None:
        if version != self.version:
            return
        self.settle()
        night, world = self.world.night, self.world
        assert self.count == count, (self.count, count)
        if self.base + count >= self.goal:
            self._finish()
            return
        if count % night.save_steps == 0:
            self._save(count)
        if night.crash_step and self.base + count == night.crash_step:
            self.die(self.ranks[night.crash_rank % self.size], code=1, failure=OWN)
            return
        for fault in world.step_faults:
            if self.attempt == 1 and fault.step == count:
                world.strike(fault)
        self.review()

    def _save(self, count: int) -> None:
        world = self.world
        path = world.path_of(self.attempt, self.base + count)
        is_odd = any(rank.counted.is_odd_at(count) for rank in self.ranks.values())
        host = self.ranks[0].host
        disk = host.name if world.travels else HERE
        version = world.files.write(disk, path, Written(self.attempt, self.base + count, is_odd))
        self.last_save = (path, count + world.named_rng.randint(0, world.night.late_steps), version)
        world.after(world.rng.uniform(0.1, 2.0), host.found, self.attempt, *self.last_save)

    def save_now(self) -> None:
        """Write a checkpoint outside the order, where names bear steps and nobody is missing."""
        self.settle()
        named = self.world.night.naming in (Naming.ITS_OWN, Naming.STEP)
        if named and self.stepping and self.count and not self.world.night.begins_anew:
            self.saved_itself = True
            self._save(self.count)

    def _finish(self) -> None:
        self.finished, self.stepping = True, False
        for rank in self.ranks.values():
            if not rank.stands:
                self.world.after(self.world.rng.uniform(0.1, 1.5), self._leave, rank)

    def _leave(self, rank: Rank) -> None:
        if rank.alive and self.world.night.stays_rank == rank.number and self.attempt == 1:
            rank.left = rank.hung = True
            rank.stance = Stance(Activity.EXITING, "", "has finished its script", since_s=self.world.now)
        elif rank.alive and not rank.stands:
            self.exited_well += 1
            self.die(rank, code=0, failure=OWN if rank.number == self.world.night.caught_rank else None)

    def die(
        self, rank: Rank, *, code: int | None = None, signal: int | None = None, failure: Failure | None = None,
        oom: bool = False, told: bool = True, ordered: bool = False,
    ) -> None:  # fmt: skip
        """End a process; its agent is told unless it is no more, its peers break unless all work is done."""
        if not rank.alive:
            return
        self.settle()
        rank.alive, rank.ended_well = False, code == 0
        if told:
            rank.host.exited(rank, code, signal, failure, oom, ordered)
        self.review()
        if not self.finished and not self.broken:
            self.broken = True
            self._spread()

    def _spread(self) -> None:
        world = self.world
        hangs = world.rng.random() < world.night.peers_hang
        for peer in self.ranks.values():
            if peer.alive and not hangs:
                world.after(world.rng.uniform(0.05, 0.9), self._fall, peer)

    def _fall(self, peer: Rank) -> None:
        if peer.alive and not peer.stands:
            self.die(peer, code=1, failure=VICTIM)


def harm_rank(rank: Rank, fault: Fault) -> None:
    """Let a fault befall a living rank."""
    rank.gang.settle()
    RANK_HARMS[fault.harm](rank, fault)
    rank.gang.review()


STANCES = {
    Harm.STUCK: Stance(Activity.BLOCKED, "train.py:88 load", "on a lock"),
    Harm.STUCK_AND_LOGS: Stance(Activity.BLOCKED, "train.py:88 load", "on a lock", logs=True),
    Harm.SPINS: Stance(Activity.SPINNING, "train.py:50 loop", cpu=1.0),
    Harm.SYNCS_BESIDE: Stance(
        Activity.WAITING_FOR_RANKS, "train.py:25 sync", "in barrier", what="barrier", others_act=True
    ),
    Harm.SLEEPS: Stance(Activity.SLEEPING, "train.py:60 nap", "in a sleep", ends_at=SLEEP_S),
    Harm.SKIPS: Stance(Activity.WAITING_FOR_RANKS, "train.py:20 odd", what="broadcast"),
    Harm.RAISES: Stance(
        Activity.WAITING_FOR_RANKS,
        "train.py:21 clean",
        "in barrier",
        what="barrier",
        raised=dataclasses.replace(OWN, traceback=""),
    ),
    Harm.ELSEWHERE: Stance(Activity.WAITING_FOR_RANKS, "train.py:30 sync", "in the store", elsewhere=True),
    Harm.EVALUATES: Stance(Activity.PROGRESSING, "train.py:70 evaluate", phase="evaluate", cpu=1.0),
    Harm.EVALUATES_AND_LOGS: Stance(Activity.PROGRESSING, "train.py:70 evaluate", phase="evaluate", cpu=1.0, logs=True),
    Harm.SAVES: Stance(Activity.BLOCKED, "train.py:80 save", "in write() of a file", phase="save"),
    Harm.NAPS: Stance(Activity.SLEEPING, "train.py:61 nap", "in a sleep", ends_at=0.0),
    Harm.LONG_STEP: Stance(Activity.SPINNING, "train.py:9 step", cpu=1.0),
}
"""What a rank does that makes no step though its process lives; the last ones end, and harm nobody."""


def _take_stance(rank: Rank, fault: Fault) -> None:
    if rank.hung:
        return
    stance, now_s = STANCES[fault.harm], rank.gang.world.now
    ends_at = None if stance.ends_at is None else now_s + min(fault.lasts_s, SLEEP_S)
    rank.stance = dataclasses.replace(stance, ends_at=ends_at, since_s=now_s)
    rank.hung = fault.lasts_s == float("inf")
    if not rank.hung:
        rank.gang.world.after(fault.lasts_s, _ends_stance, rank, rank.stance)


def _ends_stance(rank: Rank, stance: Stance) -> None:
    if rank.alive and rank.stance == stance:
        rank.gang.settle()
        rank.stance = None
        rank.gang.review()
        if rank.gang.finished:
            rank.gang._leave(rank)


def _stand(rank: Rank, state: str, lasts_s: float) -> None:
    rank.state = state
    if lasts_s != float("inf"):
        rank.gang.world.after(lasts_s, _goes_on, rank)


def _goes_on(rank: Rank) -> None:
    if rank.alive:
        rank.state = "S"
        rank.gang.review()
        if rank.gang.finished:
            rank.gang._leave(rank)


def _hang(rank: Rank) -> None:
    rank.hung = True
    rank.stance = Stance(Activity.BLOCKED, "train.py:88 load", "blocked", since_s=rank.gang.world.now)


def _immortal(rank: Rank, fault: Fault) -> None:
    rank.hung, rank.state, rank.immortal_until_s = True, "D", rank.gang.world.now + fault.lasts_s


RANK_HARMS: dict[Harm, Callable[[Rank, Fault], None]] = {
    Harm.CRASH: lambda rank, _: rank.gang.die(rank, code=1, failure=OWN),
    Harm.SIGNAL: lambda rank, _: rank.gang.die(rank, signal=11),
    Harm.FAULTS: lambda rank, _: rank.gang.die(rank, signal=11, failure=FATAL),
    Harm.OOM: lambda rank, _: rank.gang.die(rank, signal=9, oom=True),
    Harm.EXIT_EARLY: lambda rank, _: rank.gang.die(rank, code=0),
    Harm.STOPPED: lambda rank, fault: _stand(rank, "T", fault.lasts_s),
    Harm.HANG: lambda rank, _: _hang(rank),
    Harm.IMMORTAL: _immortal,
    **dict.fromkeys(STANCES, _take_stance),
    **dict.fromkeys(OUT_OF_STEP, fall_out_of_step),
}
"""What befalls a single rank, and what that does."""
