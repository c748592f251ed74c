"""What happens in one night? A seed gives the job, its limits, and what goes wrong when; nothing here runs."""

from __future__ import annotations

import dataclasses
import enum
import random
from dataclasses import dataclass, field

from orchestrator.core.plan_types import Limits, PlannedNode, PlannedPool, QueueTerms
from tests.support.brain_story import planned_node

from .lease import Lease, random_lease
from .pool import Hosts, random_hosts

FENCE_SHARE = 0.8


class Harm(enum.Enum):
    """What can go wrong."""

    CRASH = "crash"  # the rank raises an exception, once
    SIGNAL = "signal"  # the rank is killed from outside
    FAULTS = "faults"  # the rank's own code ends it by a fatal signal
    OOM = "oom"
    EXIT_EARLY = "exit early"  # the rank leaves with code 0 before its work is done
    STOPPED = "stopped"  # the rank gets SIGSTOP; continued after `lasts_s`
    HANG = "hang"  # the rank stands still for ever, its state looks innocent
    STUCK = "stuck"  # the rank stands on a lock for ever
    STUCK_AND_LOGS = "stuck and logs"  # the same, beside a thread that writes lines
    SPINS = "spins"  # the rank uses processor time in one place for ever
    SLEEPS = "sleeps"  # for an hour
    SKIPS = "skips"  # the rank enters another collective than its peers
    RAISES = "raises"  # the rank handles an exception, and enters another collective in that
    ELSEWHERE = "waits elsewhere"  # for a peer that will never come
    EVALUATES = "evaluates"  # the rank works while the others wait; this and those below end after `lasts_s`
    EVALUATES_AND_LOGS = "evaluates and logs"
    SAVES = "saves"  # the rank stands in one place, by its stack to save
    NAPS = "naps"
    LONG_STEP = "long step"
    SYNCS_BESIDE = "syncs beside"  # it waits in a collective that a thread beside it enters in a while
    SKIPS_ONE = "skips one"  # the rank runs one collective fewer in a step, and the gang goes on
    ADDS_ONE = "adds one"  # one more
    IMMORTAL = "immortal"  # the rank's process outlives SIGKILL for `lasts_s` (state D)
    AGENT_KILLED = "agent killed"
    KEEPER_KILLED = "keeper killed"  # and its agent
    HOST_LOST = "host lost"  # power gone; back, with nothing running, after `lasts_s`
    CUT_BOTH = "cut both ways"
    CUT_UP = "cut to the supervisor"
    CUT_DOWN = "cut from the supervisor"
    CUT_ALL = "all nodes cut"
    CUT_GANG = "cut between ranks"
    LINE_RESET = "line reset"
    BOSS_KILLED = "supervisor killed"  # back after `lasts_s`
    SLEPT = "job clock jumps"
    GPU_SICK = "GPU sick"  # a GPU of the host, which its agent sees in a while; healthy again after `lasts_s`
    KEY_CHANGED = "host key changed"  # whoever connects anew is refused, for `lasts_s`
    PREEMPTED = "preempted"  # the queue takes the nodes for another job, and queues this one again
    REQUEUED = "requeued"  # the same, by somebody
    SCANCEL = "cancelled in the queue"
    SLURMD_LOST = "node taken for lost"  # by the queue; what runs there lives on for `lasts_s`
    STALE_WORD = "the queue is said to have no such job"
    LATE_WORD = "the allocation is said to be over when there is another"


class Naming(enum.Enum):
    """How the script calls its checkpoints."""

    ITS_OWN = "its own"  # no two attempts share a name
    STEP = "step"  # by the step, so that the same step has the same name in every attempt
    SAVE = "save"  # by the number of the save, as epochs are
    LAST = "last"  # always the same


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong: at a time, or, where `step` is set, when the first attempt has made that step."""

    harm: Harm
    at_s: float = 0.0
    node: int = 0
    rank: int = 0
    lasts_s: float = float("inf")
    step: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """The user asks: cancel, restart, or resume (from the newest save of a path; from the newest of all where it is empty or
    was never written)."""

    at_s: float
    cancel: bool = False
    restart: bool = False
    path: str = ""
    nodes: int = 0  # a resume with another number of nodes; 0: as before


@dataclass(frozen=True, slots=True)
class Night:
    """One job and what becomes of it. `*_step` are steps of the job, 0 for never."""

    seed: int
    nodes: int
    ranks: int
    limits: Limits
    faults: tuple[Fault, ...] = ()
    asks: tuple[Ask, ...] = ()
    steps: int = 40
    step_s: float = 1.0
    save_steps: int = 10
    start_s: tuple[float, float] = (2.0, 8.0)
    latency_s: tuple[float, float] = (0.002, 0.05)
    local: bool = True
    peers_hang: float = 0.0
    says_ended: bool = False
    crash_step: int = 0
    crash_rank: int = 0
    syntax_error: bool = False
    setup_fails: int = 0
    setup_s: float = 3.0
    launch_fails: int = 0
    launch_lost: int = 0
    calm_s: float = field(default=0.0)
    naming: Naming = Naming.ITS_OWN
    prints: bool = False  # ranks make no steps: they print at each
    passes: bool = False  # and begin a backward pass
    begins_anew: bool = False  # the script does not read where it is to resume from
    tells_reads: bool = False  # hooks tell which save ranks had read when they made their first step
    stays_rank: int = -1  # this rank says its last word in the first attempt and never leaves
    late_rank: int = -1  # this rank does not come to the rendezvous in the first attempt
    hidden_rank: int = -1  # looks bring no stack of this rank before `hidden_s`
    hidden_s: float = 0.0
    serves_rank: int = -1  # this rank makes no steps, and nobody waits for it
    polls: bool = False  # ranks wait for each other in loops of their own: none is seen to wait
    look_s: tuple[float, float] = (0.1, 1.5)  # how long a look takes
    thread_saves_steps: int = 16  # how often a thread runs collectives of its own
    limit_s: float = 300.0  # how long torch lets a collective wait
    sends: bool = False  # ranks send to single others, which is counted with their collectives
    probe_rank: int = -1  # this rank alone makes steps of another optimizer now and then
    alone_steps: int = 0  # for so many steps ranks have formed no process group
    company_rank: int = -1  # but this one has
    # At the job's steps from one to the other the loss that ranks print is infinite (nan differs from itself); in so many attempts
    odd_loss: tuple[int, int] = (0, 0)
    odd_loss_attempts: int = 99
    drift: tuple[int, int] = (-1, 0)  # the parameters of this rank differ from this step of the job on
    holds_shards: bool = False  # no two ranks hold the same parameters
    full_node: int = -1  # on this node checkpoints do not fit into memory
    caught_rank: int = -1  # the log of this rank ends with a traceback, and it exits with code 0
    states: bool = False  # checkpoints state the step that they hold
    late_steps: int = 0  # so many steps too late, at most, a checkpoint's time is taken
    closes_s: tuple[float, float] = (
        0.0,
        0.0,
    )  # how long after its report ranks have gone on that wrote a save
    compare_s: tuple[float, float] = (0.05, 0.5)  # how long it takes to compare a save
    damage: float = 0.0  # how often a save is damaged or deleted between two attempts
    sharded: bool = False  # saves have files of each rank, and fit that number of ranks alone
    unloadable: tuple[int, ...] = ()  # the script cannot load the so-manieth of all that was written
    names_unloadable: bool = True  # and a library says which file it was loading
    raises_unloadable: bool = True  # it raises; else it exits with a code of its own
    spoiled: tuple[int, ...] = ()  # these are not whole any more when a node is made ready
    calls: int = 0  # each node runs a script that calls a launcher so many times; the steps are divided among them
    script_odd: int = -1  # on this node it ends before the last of these calls
    script_code: int = 0  # with which the script of node 0 ends in the first attempt
    hosts: Hosts | None = None  # a pool of hosts, from which the job takes `nodes`
    lease: Lease | None = None  # a queue system lends them; of `hosts` only what is wrong with some counts then

    @property
    def plan(self) -> tuple[PlannedNode, ...]:
        return self.plan_of(self.nodes)

    def plan_of(self, nodes: int) -> tuple[PlannedNode, ...]:
        """Return the plan of the job on so many nodes."""
        if self.hosts is not None:
            return tuple(planned_node(f"n{index}") for index in range(self.hosts.count))
        return tuple(
            planned_node(f"n{index}", *range(index * self.ranks, (index + 1) * self.ranks)) for index in range(nodes)
        )

    def pool_of(self, nodes: int) -> PlannedPool | None:
        """Return what the job takes of its hosts when it runs on so many nodes."""
        if self.lease is not None:
            queue = QueueTerms(self.lease.requeues, self.lease.grace_s)
            return PlannedPool(nodes, self.ranks, 0, self.lease.spares, self.seed, queue)
        if self.hosts is None:
            return None
        faulty = self.hosts.unfit or self.hosts.stuck
        has_setup = bool(faulty and self.seed % 2)  # else it is the program that an unfit host lacks
        return PlannedPool(nodes, self.ranks, 0, self.hosts.spares, self.seed, None, not has_setup)

    @property
    def must_end_s(self) -> float:
        """By when the job must have ended, whatever went wrong: everything heals or is given up within this time."""
        return self.calm_s + 8000.0


OF_QUEUES = (Harm.PREEMPTED, Harm.REQUEUED, Harm.SCANCEL, Harm.SLURMD_LOST, Harm.STALE_WORD, Harm.LATE_WORD)
ENDLESS = (
    Harm.STUCK, Harm.STUCK_AND_LOGS, Harm.SPINS, Harm.SLEEPS, Harm.SKIPS, Harm.ELSEWHERE,
)  # fmt: skip
INNOCENT = (Harm.EVALUATES, Harm.EVALUATES_AND_LOGS, Harm.SAVES, Harm.NAPS, Harm.LONG_STEP, Harm.SYNCS_BESIDE)
"""Ways in which a rank makes no step while its process lives: for ever, or for a while."""

OUT_OF_STEP = (Harm.SKIPS_ONE, Harm.ADDS_ONE)

_RARE = (
    Harm.FAULTS,
    Harm.RAISES,
    Harm.GPU_SICK,
    Harm.KEY_CHANGED,
    *OF_QUEUES,
    *ENDLESS,
    *INNOCENT,
    *OUT_OF_STEP,
)
_HARMS = [harm for harm in Harm if harm not in _RARE]
"""What may befall any job."""


def limits_of(**more: object) -> Limits:
    """Return the limits of the named nights: short, so that a night is over soon."""
    plain: dict[str, object] = {
        "start_timeout_s": 60.0, "hang_timeout_s": 30.0, "node_timeout_s": 20.0, "stop_grace_s": 5.0, "break_grace_s": 1.0,
        "restarts_max": 3, "backoff_s": 2.0, "backoff_max_s": 16.0, "never_on_exit_codes": (), "time_limit_s": None,
        "on_hang": "restart",
    }  # fmt: skip
    plain.update(more)
    plain.setdefault("fence_s", FENCE_SHARE * plain["node_timeout_s"])  # type: ignore[operator]
    return Limits(**plain)  # type: ignore[arg-type]


def random_night(seed: int, *, queues: bool = True) -> Night:
    """Return the night of a seed: mostly small jobs, up to four faults, sometimes an impatient user; without `queues`
    on the hosts that it would have if no queue lent them."""
    rng = random.Random(seed)
    nodes = rng.choice((1, 1, 2, 2, 2, 3, 3, 4, rng.randint(5, 8)))
    ranks = rng.choice((1, 1, 2, 2, 3, 4)) if nodes < 5 else 1
    limits = _random_limits(rng)
    faults = tuple(_random_fault(rng, nodes, ranks) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))))
    asks = _random_asks(rng, nodes)
    ends_s = [f.at_s + (f.lasts_s if f.lasts_s < 1000 else 0.0) for f in faults] + [a.at_s for a in asks]
    calm_s = max(ends_s, default=0.0)
    if limits.hang_timeout_s is None or limits.on_hang == "notify":
        calm_s += 300.0
        asks = (*asks, Ask(calm_s, cancel=True))  # nobody but the user ends what only hangs
    night = Night(
        seed, nodes, ranks, limits, faults, asks,
        steps=rng.choice((8, 20, 40, 60)), step_s=rng.choice((0.4, 1.0, 2.0)), save_steps=rng.choice((4, 7, 10, 99)),
        start_s=rng.choice(((2.0, 4.0), (2.0, 20.0))), latency_s=rng.choice(((0.002, 0.05), (0.01, 0.4), (0.1, 2.5))),
        local=rng.random() < 0.5, peers_hang=rng.choice((0.0, 0.0, 0.3, 1.0)), says_ended=rng.random() < 0.5,
        crash_step=rng.choice((0, 0, 0, 0, rng.randint(1, 30))), crash_rank=rng.randrange(nodes * ranks),
        syntax_error=rng.random() < 0.03, setup_fails=rng.choice((0,) * 20 + (1, 9)),
        setup_s=rng.choice((0.3, 0.3, 3.0, 20.0)), launch_fails=rng.choice((0,) * 24 + (1, 2, 9)),
        launch_lost=rng.choice((0,) * 20 + (1, 2)), calm_s=calm_s,
    )  # fmt: skip
    night = _restarted(_without_steps(_out_of_step(_judged_by_looks(_on_hosts(_named_otherwise(night))))))
    night = _with_bad_saves(_where_locks_tell(_partitioned(_in_queue(night) if queues else night)))
    return _with_sick_gpus(_with_hooks(_with_scripts(night)))


def _with_sick_gpus(night: Night) -> Night:
    """Let GPUs of some hosts be sick, and ranks crash or hang. Drawn from a chance of its own, too."""
    rng = random.Random(night.seed ^ 0x65D3)
    if rng.random() > 0.2 or night.hosts is None or night.lease is not None:
        return night
    at_s = rng.uniform(0.0, 60.0)
    sick = [
        Fault(
            Harm.GPU_SICK, at_s, rng.randrange(night.hosts.count), 0, rng.choice((rng.uniform(5.0, 60.0), float("inf")))
        )
        for _ in range(rng.choice((1, 1, 1, 2)))
    ]
    harms = [
        Fault(
            rng.choice((Harm.CRASH, Harm.SIGNAL, Harm.STOPPED)),
            at_s + rng.uniform(-5.0, 40.0),
            0,
            rng.randrange(night.nodes * night.ranks),
        )
        for _ in range(rng.choice((1, 2, 3)))
    ]
    harms = [dataclasses.replace(harm, at_s=max(harm.at_s, 0.0)) for harm in harms]
    return dataclasses.replace(night, faults=(*night.faults, *sick, *harms), calm_s=max(night.calm_s, at_s + 60.0))


def _with_hooks(night: Night) -> Night:
    """Let hooks tell in half of the nights which save was read. Drawn from a chance of its own, too."""
    return dataclasses.replace(night, tells_reads=random.Random(night.seed ^ 0x3EAD5).random() < 0.5)


def _with_scripts(night: Night) -> Night:
    """Let the nodes of some nights run scripts that call a launcher, one or several times. Drawn from a chance of its own,
    too."""
    rng = random.Random(night.seed ^ 0x5C217)
    if rng.random() > 0.2 or night.hosts is not None or night.begins_anew or night.prints:
        return night
    limits = dataclasses.replace(night.limits, launches=True)
    return dataclasses.replace(
        night, limits=limits, calls=rng.choice((1, 2, 3)), naming=Naming.STEP, late_steps=0, closes_s=(0.0, 0.0),
        script_code=rng.choice((0, 0, 0, 3)), script_odd=rng.choice((-1, -1, -1, -1, night.nodes - 1)),
    )  # fmt: skip


def _named_otherwise(night: Night) -> Night:
    """Let some nights have a script whose attempts share names, and half of these ignore their checkpoint.

    They save often and are broken often, since it takes several attempts for that to show. Drawn from a chance of its
    own, so that the other nights stay as they are.
    """
    rng = random.Random(night.seed ^ 0x0A9E3)
    if rng.random() > 0.15:
        return night
    harms = tuple(
        Fault(rng.choice((Harm.SIGNAL, Harm.CRASH)), rng.uniform(5.0, 200.0), 0, rng.randrange(night.ranks))
        for _ in range(rng.randint(0, 8))
    )
    return dataclasses.replace(
        night, naming=rng.choice((Naming.STEP, Naming.STEP, Naming.SAVE, Naming.LAST)),
        begins_anew=rng.random() < 0.5, late_steps=rng.choice((0, 1)), faults=(*night.faults, *harms),
        steps=rng.choice((night.steps, 60)), save_steps=rng.choice((4, 7, 10)),
        limits=dataclasses.replace(night.limits, restarts_max=rng.choice((1, 3, 5))),
        crash_step=rng.choice((night.crash_step, rng.randint(5, 30))),
    )  # fmt: skip


def _on_hosts(night: Night) -> Night:
    """Let a third of the nights be those of a job on a pool of hosts. Drawn from a chance of its own, too."""
    rng = random.Random(night.seed ^ 0x5A5B7)
    if rng.random() > 0.34:
        return night
    nodes = min(night.nodes, 4)
    hosts = random_hosts(rng, nodes)
    faults = [dataclasses.replace(fault, node=rng.randrange(hosts.count)) for fault in night.faults]
    if rng.random() < 0.1:
        faults.append(Fault(Harm.KEY_CHANGED, rng.uniform(0.0, 60.0), rng.randrange(hosts.count)))
    asks = tuple(dataclasses.replace(ask, nodes=min(ask.nodes, hosts.count)) for ask in night.asks)
    names = (Naming.ITS_OWN, Naming.STEP) if hosts.travels else (night.naming,)
    return dataclasses.replace(
        night, nodes=nodes, hosts=hosts, faults=tuple(faults), asks=asks, calm_s=max(night.calm_s, hosts.calm_s),
        naming=night.naming if night.naming in names else Naming.STEP,
    )  # fmt: skip


def _judged_by_looks(night: Night) -> Night:
    """Let a third of the nights be those of a job whose silence is judged by what it has shown, with ranks that stand
    still in all the ways there are. Drawn from a chance of its own, too."""
    rng = random.Random(night.seed ^ 0x4A96)
    if rng.random() > 0.34 or night.limits.hang_timeout_s is None:
        return night
    size = night.nodes * night.ranks
    still = [
        Fault(rng.choice(ENDLESS), rng.uniform(5.0, 120.0), 0, rng.randrange(size))
        for _ in range(rng.choice((0, 1, 1, 2)))
    ]
    pauses = [
        Fault(rng.choice(INNOCENT), rng.uniform(5.0, 100.0), 0, rng.randrange(size), rng.uniform(1.0, 50.0))
        for _ in range(rng.choice((0, 1, 2, 3)))
    ]
    limits = dataclasses.replace(night.limits, hang_timeout_s=0.0)
    return dataclasses.replace(
        night, limits=limits, limit_s=rng.choice((120.0, 300.0)), faults=(*night.faults, *still, *pauses), calm_s=max(night.calm_s, 180.0),
        stays_rank=rng.choice((-1, -1, -1, rng.randrange(size))),
    )  # fmt: skip


def _out_of_step(night: Night) -> Night:
    """Let ranks of some nights skip or add a collective. Drawn from a chance of its own, too."""
    rng = random.Random(night.seed ^ 0xDE5C)
    if rng.random() > 0.12:
        return night
    size = night.nodes * night.ranks
    odd = [
        Fault(rng.choice(OUT_OF_STEP), rng.uniform(10.0, 80.0), 0, rng.randrange(size))
        for _ in range(rng.choice((1, 1, 2)))
    ]
    limits = dataclasses.replace(night.limits, on_desync=rng.choice(("fail", "fail", "notify")))
    return dataclasses.replace(
        night, limits=limits, faults=(*night.faults, *odd), steps=rng.choice((night.steps, 60)),
        save_steps=rng.choice((4, 7, 10)), calm_s=max(night.calm_s, 100.0),
    )  # fmt: skip


def _with_bad_saves(night: Night) -> Night:
    """Let saves of some nights be slow, and suffer between attempts, and let people name some to resume from. Drawn from a
    chance of its own, too."""
    rng = random.Random(night.seed ^ 0x5A7E5)
    asks = tuple(dataclasses.replace(ask, path=_some_path(rng, night)) if ask.path else ask for ask in night.asks)
    night = dataclasses.replace(
        night, asks=asks, closes_s=rng.choice(((0.0, 0.0), (0.0, 0.0), (0.5, 5.0), (1.0, 15.0))),
        compare_s=rng.choice(((0.05, 0.5), (0.05, 0.5), (0.5, 20.0))),
        damage=rng.choice((0.0, 0.0, 0.1, 0.5, 1.0)), sharded=rng.random() < 0.1,
    )  # fmt: skip
    is_other = night.prints or night.begins_anew or night.syntax_error
    return night if is_other or rng.random() > 0.2 else _unloadable(rng, night)


def _unloadable(rng: random.Random, night: Night) -> Night:
    """Let the script be unable to load some of what it saves. It saves often and is broken often, since it takes several
    attempts for that to show."""
    harms = tuple(
        Fault(rng.choice((Harm.SIGNAL, Harm.CRASH)), rng.uniform(15.0, 200.0), 0, rng.randrange(night.ranks))
        for _ in range(rng.randint(1, 6))
    )
    first, is_spoiled = rng.randint(1, 5), rng.random() < 0.2
    bad = tuple(range(first, first + rng.choice((1, 2, 2, 3, 400))))
    more = [
        Ask(rng.uniform(150.0, 500.0), path=rng.choice(("", _some_path(rng, night))))
        for _ in range(rng.choice((0, 1, 2)))
    ]
    return dataclasses.replace(
        night, faults=(*night.faults, *harms), steps=60, save_steps=rng.choice((4, 7, 10)),
        damage=rng.choice((0.0, 0.0, 0.1)), names_unloadable=rng.random() < 0.5,
        unloadable=() if is_spoiled else bad, spoiled=bad if is_spoiled else (),
        limits=dataclasses.replace(night.limits, restarts_max=rng.choice((1, 3, 5, 8))),
        asks=tuple(sorted((*night.asks, *more), key=lambda ask: ask.at_s)),
    )  # fmt: skip


def _some_path(rng: random.Random, night: Night) -> str:
    """Return the path of a save that there may be."""
    step = night.save_steps * rng.randint(1, 3)
    match night.naming:
        case Naming.ITS_OWN:
            return f"a{rng.randint(1, 2)}/step-{step}"
        case Naming.STEP:
            return f"step-{step:06d}.pt"
        case Naming.SAVE:
            return f"epoch-{rng.randint(1, 3)}.pt"
        case Naming.LAST:
            return "last.pt"


def _without_steps(night: Night) -> Night:
    """Let the ranks of some nights make no steps and no checkpoints, as in inference, and have them work for long, with
    lines that break and supervisors that die. Drawn from a chance of its own, too."""
    rng = random.Random(night.seed ^ 0x1FE2)
    if rng.random() > 0.1 or night.limits.hang_timeout_s == 0.0 or night.begins_anew:
        return night
    harms = (Harm.BOSS_KILLED, Harm.CUT_BOTH, Harm.CUT_ALL, Harm.SIGNAL, Harm.HOST_LOST)
    more = [
        Fault(
            rng.choice(harms),
            rng.uniform(20.0, 300.0),
            rng.randrange(night.nodes),
            0,
            rng.uniform(5.0, 200.0),
        )
        for _ in range(rng.choice((1, 2, 3)))
    ]
    faults = [fault for fault in night.faults if fault.harm not in OUT_OF_STEP]
    return dataclasses.replace(
        night, prints=True, save_steps=10_000, steps=rng.choice((60, 300)), faults=(*faults, *more),
        naming=Naming.ITS_OWN, calm_s=max(night.calm_s, 500.0),
    )  # fmt: skip


def with_auto_times(limits: Limits) -> Limits:
    """Return the limits with what `monitor.node_timeout: auto` is for several nodes."""
    return dataclasses.replace(limits, node_timeout_s=60.0, fence_s=16.0, disconnected_timeout_s=48.0)


def _partitioned(night: Night) -> Night:
    """Let hosts of some nights be cut off from all others for a while, some of them after their supervisor was away.
    Drawn from a chance of its own, too."""
    rng = random.Random(night.seed ^ 0x9A27)
    if rng.random() > 0.15 or night.hosts is None or night.nodes < 2:
        return night
    at_s, node = rng.uniform(8.0, 60.0), rng.randrange(night.hosts.count)
    lasts_s = rng.choice((rng.uniform(5.0, 20.0), rng.uniform(30.0, 200.0)))
    away_s = rng.choice((0.0, 0.0, rng.uniform(5.0, 150.0)))
    away = Fault(rng.choice((Harm.CUT_BOTH, Harm.BOSS_KILLED)), at_s, node, 0, away_s + rng.uniform(0.0, 10.0))
    cuts = [Fault(harm, at_s + away_s, node, 0, lasts_s) for harm in (Harm.CUT_BOTH, Harm.CUT_GANG)]
    return dataclasses.replace(
        night, limits=with_auto_times(night.limits), calm_s=max(night.calm_s, at_s + away_s + lasts_s + 20.0),
        faults=(*night.faults, *([away] if away_s else []), *cuts), steps=rng.choice((night.steps, 300)),
        peers_hang=rng.choice((night.peers_hang, 1.0)),
    )  # fmt: skip


def _where_locks_tell(night: Night) -> Night:
    """Let some of the nights on one machine be such that no agent ever goes by itself; what cuts a line there stands for
    an agent that does not answer. Drawn from a chance of its own, too."""
    rng = random.Random(night.seed ^ 0x10C5)
    if rng.random() > 0.3 or not night.local or night.hosts is not None:
        return night
    return dataclasses.replace(night, limits=dataclasses.replace(night.limits, fence_s=None))


def _restarted(night: Night) -> Night:
    """Let the users of some nights restart the job. Drawn from a chance of its own, too."""
    rng = random.Random(night.seed ^ 0x4E57)
    if rng.random() > 0.1:
        return night
    asks = [Ask(rng.uniform(1.0, 150.0), restart=True) for _ in range(rng.choice((1, 1, 2)))]
    return dataclasses.replace(night, asks=tuple(sorted((*night.asks, *asks), key=lambda ask: ask.at_s)))


def _in_queue(night: Night) -> Night:
    """Let some of the nights be those of a job whose nodes a queue system lends, with harms that only such a one
    knows. Drawn from a chance of its own, too."""
    rng = random.Random(night.seed ^ 0x51AE3)
    if rng.random() > 0.2:
        return night
    nodes = min(night.nodes, 4)
    lease = random_lease(rng, nodes)
    if night.begins_anew:  # stay after stay makes the same steps once more, and seems to get further
        lease = dataclasses.replace(lease, stay_s=float("inf"))
    kinds = (
        Harm.PREEMPTED,
        Harm.PREEMPTED,
        Harm.REQUEUED,
        Harm.SLURMD_LOST,
        Harm.HOST_LOST,
        Harm.SCANCEL,
        Harm.STALE_WORD,
    )
    more = [
        Fault(
            rng.choice(kinds),
            rng.uniform(2.0, 120.0),
            rng.randrange(lease.count),
            0,
            rng.choice((30.0, 100.0)),
        )
        for _ in range(rng.choice((0, 1, 1, 2, 3)))
    ]
    faults = [dataclasses.replace(fault, node=rng.randrange(lease.count)) for fault in night.faults]
    gone = {fault.node for fault in faults if fault.harm is Harm.HOST_LOST and fault.lasts_s == float("inf")}
    if lease.count - len(gone) < nodes + lease.spares:  # the job would be in the queue for ever
        faults = [
            dataclasses.replace(fault, lasts_s=100.0) if fault.harm is Harm.HOST_LOST else fault for fault in faults
        ]
    some = tuple(rng.sample(range(lease.count), rng.choice((0, 0, 0, 1))))
    hosts = Hosts(lease.count, lease.spares)
    hosts = dataclasses.replace(hosts, bad=some) if rng.random() < 0.5 else dataclasses.replace(hosts, unfit=some)
    return dataclasses.replace(
        night, nodes=nodes, lease=lease, hosts=hosts, local=False,
        faults=(*faults, *more), asks=tuple(dataclasses.replace(ask, nodes=0) for ask in night.asks),
        limits=dataclasses.replace(night.limits, time_limit_s=None), calm_s=max(night.calm_s, 220.0),
    )  # fmt: skip


def _random_limits(rng: random.Random) -> Limits:
    return limits_of(
        start_timeout_s=rng.choice((60.0, 90.0)),
        hang_timeout_s=rng.choice((None, 25.0, 25.0, 60.0, 60.0)),
        node_timeout_s=rng.choice((15.0, 30.0)),
        stop_grace_s=rng.choice((2.0, 10.0)),
        restarts_max=rng.choice((0, 1, 2, 3, 3, 5)),
        never_on_exit_codes=rng.choice(((), (), (), (1,))),
        time_limit_s=rng.choice((None, None, None, 60.0, 300.0)),
        on_hang=rng.choice(("restart", "restart", "restart", "fail", "notify")),
    )


def _random_fault(rng: random.Random, nodes: int, ranks: int) -> Fault:
    harm = rng.choice(_HARMS)
    lasts_s = rng.choice((rng.uniform(0.5, 8.0), rng.uniform(5.0, 60.0), rng.uniform(20.0, 120.0), float("inf")))
    if harm in (Harm.BOSS_KILLED, Harm.SLEPT):
        lasts_s = rng.choice((0.0, rng.uniform(0.0, 100.0)))
    if harm is Harm.CUT_ALL:
        lasts_s = min(lasts_s, 900.0)
    at_s = rng.choice((rng.uniform(0.0, 12.0), rng.uniform(5.0, 100.0)))
    return Fault(harm, at_s, rng.randrange(nodes), rng.randrange(nodes * ranks), lasts_s)


def _random_asks(rng: random.Random, nodes: int) -> tuple[Ask, ...]:
    asks: list[Ask] = []
    if rng.random() < 0.2:
        asks.append(Ask(rng.uniform(0.0, 120.0), cancel=True))
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        other = rng.choice((0, 0, 0, max(1, nodes - 1), min(8, nodes + 1)))
        asks.append(Ask(rng.uniform(60.0, 400.0), path=rng.choice(("", "", "user/unknown")), nodes=other))
    return tuple(sorted(asks, key=lambda ask: ask.at_s))
