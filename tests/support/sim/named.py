"""Which nights does a reviewer read? A few with a name, each for one way in which things go; see `transcripts/`."""

from __future__ import annotations

from .lease import Lease
from .night import Ask, Fault, Harm, Naming, Night, limits_of, with_auto_times
from .pool import Busy, Hosts

FOR_EVER_S = float("inf")


def _queued(lease: Lease, *faults: Fault, bad: tuple[int, ...] = (), **more: object) -> Night:
    """Return a night in which a queue system lends the nodes."""
    hosts = Hosts(lease.count, lease.spares, bad=bad)
    return _night(*faults, lease=lease, hosts=hosts, local=False, **more)  # type: ignore[arg-type]


def _night(*faults: Fault, nodes: int = 2, ranks: int = 2, asks: tuple[Ask, ...] = (), **more: object) -> Night:
    limits, seed = more.pop("limits", limits_of()), more.pop("seed", 7)
    return Night(seed, nodes, ranks, limits, faults, asks, calm_s=300.0, **more)  # type: ignore[arg-type]


def _auto(*faults: Fault, **more: object) -> Night:
    """Return a night whose silence is judged by what the job has shown."""
    return _night(*faults, **{"limits": limits_of(hang_timeout_s=0.0), **more})  # type: ignore[arg-type]


def _partitioned(at_s: float, *faults: Fault, steps: int = 200, prints: bool = False) -> Night:
    """Return a night in which a node is cut off from all others at a time."""
    cuts = (Fault(harm, at_s, node=1, lasts_s=200.0) for harm in (Harm.CUT_BOTH, Harm.CUT_GANG))
    return _night(
        *faults,
        *cuts,
        hosts=Hosts(4, spares=1),
        local=False,
        steps=steps,
        prints=prints,
        peers_hang=1.0,
        limits=with_auto_times(limits_of()),
    )


BRIEF = limits_of(hang_timeout_s=20.0)
"""A limit that a transcript can wait for."""

NAMED = {
    "a-quiet-night": _night(),
    "crash-with-victims": _night(Fault(Harm.CRASH, rank=2, step=14)),
    "a-script-with-two-launcher-calls": _night(
        Fault(Harm.SIGNAL, 45.0, rank=2), calls=2, naming=Naming.STEP, limits=limits_of(launches=True)
    ),
    "fatal-signal-again-before-any-step": _night(
        Fault(Harm.FAULTS, 3.0, rank=0), Fault(Harm.FAULTS, 5.0, rank=1)
    ),
    "oom-kill": _night(Fault(Harm.OOM, rank=1, step=14)),
    "hang-with-stacks": _night(Fault(Harm.HANG, rank=3, step=14)),
    "hang-stuck-and-named": _auto(Fault(Harm.STUCK, rank=3, step=14), limits=BRIEF),
    "hang-beside-a-thread-that-logs": _auto(
        Fault(Harm.STUCK_AND_LOGS, rank=1, step=14), limits=BRIEF
    ),
    "hang-in-different-collectives": _auto(Fault(Harm.SKIPS, rank=2, step=14)),
    "hang-behind-an-exception": _auto(Fault(Harm.RAISES, rank=1, step=14), nodes=1),
    "no-hang-but-a-thread-that-comes-to-a-barrier": _auto(Fault(Harm.SYNCS_BESIDE, rank=2, step=14, lasts_s=60.0)),
    "no-hang-beside-a-rank-that-serves": _auto(Fault(Harm.NAPS, rank=0, step=14, lasts_s=30.0), serves_rank=3),
    "no-hang-but-ranks-that-poll-for-one": _auto(Fault(Harm.NAPS, rank=2, step=14, lasts_s=30.0), polls=True),
    "hang-of-ranks-that-make-passes-and-no-steps": _auto(
        Fault(Harm.STUCK, rank=2, step=24, lasts_s=60.0), prints=True, passes=True, steps=60, save_steps=99
    ),
    "hang-while-others-poll": _auto(Fault(Harm.STUCK, rank=2, step=14), polls=True),
    "hang-of-the-network": _auto(
        Fault(Harm.CUT_GANG, node=1, step=14, lasts_s=60.0), limits=BRIEF
    ),
    "hang-after-the-last-word": _auto(stays_rank=2, limits=BRIEF),
    "hang-again-at-the-same-place": _auto(*(Fault(Harm.SKIPS, at_s, rank=3) for at_s in range(5, 120)), save_steps=99),
    "hang-that-no-state-proves-again": _auto(
        *(Fault(Harm.HANG, at_s, rank=3) for at_s in range(8, 600, 8)), start_s=(10.0, 12.0),
        limits=BRIEF,
    ),
    "no-hang-within-the-time-that-torch-gives": _auto(
        Fault(Harm.SPINS, rank=2, step=14, lasts_s=100.0), limits=limits_of(hang_timeout_s=0.0), limit_s=150.0
    ),
    "hang-noticed-and-taken-back": _auto(
        Fault(Harm.CUT_GANG, node=1, step=14, lasts_s=100.0), limits=limits_of(hang_timeout_s=20.0, on_hang="notify")
    ),
    "no-hang-but-an-evaluation": _auto(Fault(Harm.EVALUATES, rank=0, step=14, lasts_s=100.0)),
    "desync-and-resumed-from-before": _night(
        Fault(Harm.SKIPS_ONE, rank=2, step=14), asks=(Ask(60.0),), save_steps=5
    ),
    "desync-noticed": _night(Fault(Harm.ADDS_ONE, rank=1, step=14), limits=limits_of(on_desync="notify")),
    "ranks-that-are-alone": _night(steps=40, alone_steps=99),
    "ranks-that-are-alone-for-a-while": _night(steps=60, alone_steps=45),
    "ranks-of-which-one-is-in-company": _night(steps=40, alone_steps=99, company_rank=2),
    "ranks-that-are-alone-and-end-early": _night(steps=12, alone_steps=99),
    "ranks-whose-loss-is-infinite": _night(odd_loss=(12, 99)),
    "ranks-whose-loss-is-infinite-for-a-while": _night(odd_loss=(12, 24)),
    "a-loss-that-stays-infinite-is-rolled-back": _night(
        odd_loss=(19, 99), odd_loss_attempts=1, limits=limits_of(on_nan="rollback")
    ),
    "a-loss-that-is-infinite-twice-fails": _night(odd_loss=(19, 99), limits=limits_of(on_nan="rollback")),
    "a-loss-that-stays-infinite-fails": _night(odd_loss=(19, 99), limits=limits_of(on_nan="fail")),
    "a-rank-that-drifts": _night(drift=(2, 19), limits=limits_of(compare_steps=3)),
    "a-rank-that-drifts-within-a-heartbeat": _night(drift=(2, 21), step_s=0.7, limits=limits_of(compare_steps=1)),
    "replicas-on-hosts-of-their-own": _night(ranks=1, step_s=0.3, limits=limits_of(compare_steps=1)),
    "a-rank-that-differs-early": _night(drift=(2, 5), limits=limits_of(compare_steps=3)),
    "a-node-without-room-in-memory": _night(Fault(Harm.CRASH, rank=2, step=14), full_node=1),
    "ranks-that-hold-shards": _night(holds_shards=True, limits=limits_of(compare_steps=3)),
    "ranks-of-which-one-ends-well-behind-a-traceback": _night(steps=12, caught_rank=2),
    "checkpoints-that-state-their-step": _night(
        Fault(Harm.CRASH, rank=2, step=28), naming=Naming.SAVE, late_steps=9, states=True
    ),
    "checkpoint-damaged-between-attempts": _night(
        Fault(Harm.CRASH, rank=2, step=24), Fault(Harm.SIGNAL, 60.0, rank=1), damage=1.0, seed=15
    ),
    "checkpoint-cut-off-by-a-kill": _night(Fault(Harm.CRASH, rank=2, step=24), naming=Naming.LAST, seed=11),
    "checkpoint-closed-at-the-end-of-its-attempt": _night(
        Fault(Harm.CRASH, rank=2, step=21), closes_s=(5.0, 8.0), seed=1
    ),
    "checkpoint-that-cannot-be-loaded": _night(Fault(Harm.CRASH, rank=2, step=24), unloadable=(2,)),
    "checkpoint-that-cannot-be-loaded-and-is-tried-again-after-a-cancel": _night(
        Fault(Harm.CRASH, rank=2, step=24), unloadable=(2,),
        asks=(Ask(46.0, cancel=True), Ask(60.0), Ask(95.0, cancel=True), Ask(110.0), Ask(114.0, cancel=True), Ask(125.0)),
    ),
    "checkpoint-that-cannot-be-loaded-and-no-library-says-so": _night(
        Fault(Harm.CRASH, rank=2, step=24), unloadable=(2,), names_unloadable=False
    ),
    "checkpoints-of-which-none-can-be-loaded": _night(
        Fault(Harm.CRASH, rank=2, step=24), unloadable=tuple(range(1, 100)), names_unloadable=False, asks=(Ask(100.0),),
        raises_unloadable=False,
    ),
    "checkpoints-that-the-code-cannot-load": _night(
        Fault(Harm.CRASH, rank=2, step=34), unloadable=tuple(range(1, 100)), limits=limits_of(restarts_max=6)
    ),
    "checkpoints-of-one-step-that-cannot-be-loaded": _night(
        Fault(Harm.CRASH, rank=2, step=24), unloadable=(3, 4), names_unloadable=False, raises_unloadable=False, limits=limits_of(restarts_max=6),
        naming=Naming.SAVE, late_steps=6, save_steps=5, seed=3,
    ),
    "checkpoint-that-is-not-whole-on-a-node": _night(Fault(Harm.CRASH, rank=2, step=24), spoiled=(2,)),
    "checkpoint-of-other-ranks": _night(asks=(Ask(25.0, cancel=True), Ask(60.0, nodes=1), Ask(90.0, nodes=2)), sharded=True),
    "resume-from-a-named-checkpoint": _night(
        Fault(Harm.CRASH, rank=2, step=24), Fault(Harm.SIGNAL, 95.0, rank=1),
        asks=(Ask(50.0, cancel=True), Ask(70.0, path="a1/step-10")),
    ),
    "resume-after-a-resume-from-a-named-checkpoint": _night(
        asks=(
            Ask(48.5, cancel=True), Ask(60.0, path="a1/step-10"), Ask(82.0, cancel=True),
            Ask(100.0, path="a2/step-20"), Ask(105.0, cancel=True), Ask(120.0),
        ), seed=3,
    ),
    "resume-from-a-named-checkpoint-that-cannot-be-loaded": _night(
        asks=(Ask(38.5, cancel=True), Ask(60.0, path="a1/step-20")), unloadable=(2,), seed=3
    ),
    "resume-from-a-named-checkpoint-that-is-damaged": _night(
        asks=(Ask(38.5, cancel=True), Ask(44.0, path="a1/step-20"), Ask(80.0)), damage=1.0, seed=1,
    ),
    "resume-from-a-named-checkpoint-that-the-script-ignores": _night(
        Fault(Harm.SIGNAL, 73.0, rank=1), asks=(Ask(38.5, cancel=True), Ask(50.0, path="a1/step-20")), begins_anew=True, seed=3,
    ),
    "supervisor-killed-while-a-checkpoint-is-compared": _night(
        Fault(Harm.CRASH, rank=2, step=14), Fault(Harm.BOSS_KILLED, 23.5, lasts_s=12.0), compare_s=(6.0, 7.0)
    ),
    "supervisor-killed-once-a-checkpoint-was-compared": _night(
        Fault(Harm.CRASH, rank=2, step=24), Fault(Harm.BOSS_KILLED, 34.79, lasts_s=12.0),
        Fault(Harm.SIGNAL, 90.0, rank=1), damage=1.0, compare_s=(2.0, 3.0),
    ),
    "stopped-rank": _night(Fault(Harm.STOPPED, rank=3, step=14)),
    "node-lost-and-fenced": _night(Fault(Harm.CUT_BOTH, node=1, step=14, lasts_s=70.0), Fault(Harm.HANG, rank=0, step=15)),
    "host-reboots": _night(Fault(Harm.HOST_LOST, node=1, step=14, lasts_s=40.0), local=False),
    "host-gone-for-good": _night(Fault(Harm.HOST_LOST, node=1, step=14), local=False),
    "agent-killed": _night(Fault(Harm.AGENT_KILLED, node=1, step=14)),
    "line-cut-while-the-gang-goes-on": _night(Fault(Harm.CUT_BOTH, node=1, step=14, lasts_s=18.0)),
    "supervisor-killed": _night(Fault(Harm.BOSS_KILLED, step=14, lasts_s=12.0)),
    "supervisor-killed-while-a-rank-crashes": _night(
        Fault(Harm.BOSS_KILLED, step=14, lasts_s=12.0), Fault(Harm.CRASH, rank=1, step=18)
    ),
    "no-progress": _night(crash_step=14, crash_rank=1),
    "script-ignores-its-checkpoint": _night(naming=Naming.STEP, begins_anew=True, late_steps=1, crash_step=14, crash_rank=1),
    "script-ignores-the-one-checkpoint-that-it-overwrites": _night(
        naming=Naming.LAST, begins_anew=True, crash_step=14, crash_rank=1
    ),
    "script-reads-no-checkpoint": _night(
        Fault(Harm.SIGNAL, 30.0, rank=1), naming=Naming.LAST, begins_anew=True, tells_reads=True
    ),
    "syntax-error": _night(syntax_error=True),
    "budget-spent": _night(*(Fault(Harm.SIGNAL, at_s, rank=1) for at_s in range(5, 90, 5)), limits=limits_of(restarts_max=2)),
    "restart-asked-for": _night(
        Fault(Harm.SIGNAL, 12.0, rank=1), asks=(Ask(2.5, restart=True), Ask(4.5, restart=True), Ask(40.0, restart=True)),
        limits=limits_of(restarts_max=1),
    ),
    "cancel-while-preparing": _night(asks=(Ask(1.5, cancel=True),)),
    "cancel-while-running": _night(asks=(Ask(20.0, cancel=True),)),
    "cancel-while-backing-off": _night(
        *(Fault(Harm.SIGNAL, at_s, rank=1) for at_s in range(5, 200, 2)),
        asks=(Ask(30.0, cancel=True),), limits=limits_of(restarts_max=9, backoff_s=16.0),
    ),
    "cancel-and-resume": _night(asks=(Ask(25.0, cancel=True), Ask(60.0))),
    "resume-on-fewer-nodes-after-an-immortal-process": _night(
        Fault(Harm.IMMORTAL, rank=3, step=14, lasts_s=400.0), asks=(Ask(150.0, nodes=1), Ask(300.0, nodes=1), Ask(600.0, nodes=1)),
    ),
    "a-stale-checkpoint-comes-late": _night(
        Fault(Harm.CUT_BOTH, node=0, step=9, lasts_s=60.0), Fault(Harm.CRASH, rank=2, step=12),
        *(Fault(Harm.SIGNAL, at_s, rank=2) for at_s in range(73, 84)),
    ),
    "one-node-cut-off-trains-on": _night(Fault(Harm.CUT_BOTH, node=0, step=14, lasts_s=100.0), nodes=1, steps=400),
    "pool-a-spare-takes-over": _night(Fault(Harm.HOST_LOST, node=1, step=14), hosts=Hosts(4, spares=1), local=False),
    "all-lines-cut-while-the-gang-goes-on": _night(
        Fault(Harm.CUT_ALL, step=14, lasts_s=50.0), steps=100, peers_hang=1.0, limits=with_auto_times(limits_of())
    ),
    "pool-partitioned-after-a-long-pause": _partitioned(80.0, Fault(Harm.EVALUATES, rank=0, step=5, lasts_s=25.0)),
    "pool-partitioned-after-long-work-without-steps": _partitioned(200.0, prints=True, steps=400),
    "pool-partitioned-while-others-stand-still": _partitioned(20.0),
    "pool-partitioned-after-long-without-a-line": _partitioned(140.0, Fault(Harm.CUT_BOTH, node=1, step=14, lasts_s=200.0)),
    "pool-partitioned-while-the-supervisor-was-away": _partitioned(
        128.0, Fault(Harm.BOSS_KILLED, step=14, lasts_s=112.0)
    ),
    "pool-lost-without-a-spare": _night(Fault(Harm.HOST_LOST, node=1, step=14), hosts=Hosts(3), local=False),
    "pool-lost-and-no-other-host": _night(Fault(Harm.HOST_LOST, node=1, step=14), hosts=Hosts(2), local=False),
    "pool-lost-and-back": _night(Fault(Harm.HOST_LOST, node=1, step=14, lasts_s=35.0), hosts=Hosts(2), local=False),
    "pool-busy-then-free": _night(hosts=Hosts(2, busy=(Busy(1, 0.0, 20.0),))),
    "pool-behind-other-jobs": _night(hosts=Hosts(2, ahead=(20.0, 30.0))),
    "pool-two-keys-are-wrong": _night(hosts=Hosts(4, bad=(0, 2))),
    "pool-all-keys-are-wrong": _night(hosts=Hosts(3, bad=(0, 1, 2))),
    "pool-a-hang-that-goes-along-to-another-host": _auto(
        *(Fault(Harm.SKIPS, at_s, rank=3) for at_s in range(5, 240)), hosts=Hosts(4, spares=1), save_steps=99
    ),
    "pool-a-node-cannot-reach-the-first": _night(hosts=Hosts(3, nets=("a", "z", "a"), bridge=True)),
    "pool-checkpoint-on-its-way-at-a-crash": _night(
        Fault(Harm.CRASH, rank=2, step=12), hosts=Hosts(2, copy_s=(20.0, 30.0))
    ),
    "pool-checkpoint-on-its-way-from-a-lost-host": _night(
        Fault(Harm.HOST_LOST, node=0, step=14), hosts=Hosts(3, copy_s=(100.0, 200.0)), local=False
    ),
    "pool-what-does-not-arrive-leaves-what-is-at-home": _night(
        Fault(Harm.CRASH, rank=2, step=14), Fault(Harm.SIGNAL, 50.0, rank=2), naming=Naming.STEP, begins_anew=True,
        hosts=Hosts(2, copy_s=(1.0, 2.0), copies_fail=0.5),
    ),
    "pool-a-sick-gpu-and-a-spare": _night(
        Fault(Harm.GPU_SICK, 1.0, node=1), Fault(Harm.SIGNAL, 9.0, rank=2), Fault(Harm.SIGNAL, 20.0, rank=0),
        hosts=Hosts(4, spares=1), local=False, limits=limits_of(restarts_max=1), start_s=(12.0, 14.0),
    ),
    "pool-a-sick-gpu-and-no-other-host": _night(
        Fault(Harm.GPU_SICK, node=1, step=9), Fault(Harm.CRASH, rank=2, step=14), hosts=Hosts(2), local=False
    ),
    "pool-a-sick-gpu-and-the-other-host-is-busy": _night(
        Fault(Harm.GPU_SICK, node=1, step=9), Fault(Harm.CRASH, rank=2, step=14), local=False,
        hosts=Hosts(3, busy=(Busy(2, 0.0, FOR_EVER_S),)),
    ),
    "queue-preempted": _queued(Lease(4), Fault(Harm.PREEMPTED, step=14)),
    "queue-preempted-and-term-kills-ranks": _queued(Lease(4, term_kills=True), Fault(Harm.PREEMPTED, step=14)),
    "queue-requeued-from-outside": _queued(Lease(4), Fault(Harm.REQUEUED, step=14)),
    "queue-time-limit-and-back": _queued(Lease(4, stay_s=45.0)),
    "queue-time-limit-and-over": _queued(Lease(4, stay_s=45.0, requeues=False)),
    "queue-scancel": _queued(Lease(4), Fault(Harm.SCANCEL, step=14)),
    "queue-scancel-before-it-began": _queued(Lease(4, wait_s=(30.0, 30.0)), Fault(Harm.SCANCEL, 5.0)),
    "queue-cancel-while-preempted": _queued(
        Lease(4, kill_s=40.0, grace_s=20.0), Fault(Harm.HANG, 19.0), Fault(Harm.PREEMPTED, 20.0),
        asks=(Ask(24.0, cancel=True),),
    ),
    "queue-first-node-lost": _queued(Lease(4), Fault(Harm.HOST_LOST, step=14)),
    "queue-an-old-agent-lives-on-until-it-fences-itself": _queued(
        Lease(4, noticed_s=(1.0, 2.0)), Fault(Harm.SLURMD_LOST, node=1, step=14, lasts_s=500.0),
        Fault(Harm.CUT_BOTH, node=1, step=14, lasts_s=500.0), Fault(Harm.HOST_LOST, step=15),
    ),
    "queue-a-whole-gang-trains-on-beside-its-job": _queued(
        Lease(4, wait_s=(1.0, 1.0)), Fault(Harm.SLURMD_LOST, node=1, step=14, lasts_s=600.0),
        Fault(Harm.CUT_BOTH, node=1, step=14, lasts_s=600.0), Fault(Harm.SLURMD_LOST, step=14, lasts_s=600.0),
        Fault(Harm.CUT_BOTH, step=14, lasts_s=600.0), steps=400,
    ),
    "queue-an-older-allocation-is-said-to-be-over": _queued(
        Lease(4), Fault(Harm.LATE_WORD, 10.0), Fault(Harm.REQUEUED, step=14)
    ),
    "queue-requeued-from-outside-while-ranks-hang": _queued(
        Lease(4, kill_s=12.0, grace_s=20.0, tells=True), Fault(Harm.HANG, 19.0), Fault(Harm.REQUEUED, 20.0)
    ),
    "queue-node-lost-and-a-spare": _queued(Lease(4, spares=1), Fault(Harm.HOST_LOST, node=1, step=14)),
    "queue-node-lost-without-a-spare": _queued(Lease(4), Fault(Harm.HOST_LOST, node=1, step=14)),
    "queue-too-few-nodes-can-be-used": _queued(Lease(4), bad=(0, 1, 2, 3), limits=limits_of(restarts_max=1)),
    "queue-supervisor-gone-at-the-time-limit": _queued(
        Lease(4, stay_s=45.0), Fault(Harm.BOSS_KILLED, 20.0, lasts_s=1000.0)
    ),
    "queue-resumed-after-scancel": _queued(Lease(4), Fault(Harm.SCANCEL, 25.0), asks=(Ask(90.0),)),
}  # fmt: skip
