"""Which hangs must be found, and what must be said of each? Data only: `test_hangs.py` and `bench/hang_gallery.py` read it.

Four ranks on two nodes: ranks 0 and 1 on node-0, 2 and 3 on node-1. Everything happens in attempt 1, after a warm-up
of quick steps unless the case is about the start; attempt 2 does well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .script import lines_at_fault, plain, training

SILENCE_S = 5.0
"""The silence that makes quick steps suspicious: `max(5 s, 3 x the usual step)`."""

PROOF_S_MAX = SILENCE_S + 5.0
"""From the last sign of progress to the name of who is suspected, and to the verdict where a state or the collectives prove
the hang."""

HANG_TIMEOUT_S = 12.0
"""So that it need not be waited for half an hour: `monitor.hang_timeout` where no state proves the hang."""

UNPROVED: dict[str, Any] = {"found_s_max": 24.0, "spec": {"monitor": {"hang_timeout": HANG_TIMEOUT_S}}}
"""Of a rank that stands in one place while no state proves that it hangs."""

START_S_MAX = 40.0
"""The same before the first step, when 30 s are no reason for suspicion."""


@dataclass(frozen=True, slots=True)
class Case:
    """One hang.

    `says`: texts of the verdict's culprit or summary; `waits`: texts of what the others wait in; `found_s_max`: its
    limit on a quiet machine; `ranks`: None where chance picks the first that is hurt.
    """

    name: str
    script: str
    ranks: tuple[int, ...] | None
    says: tuple[str, ...]
    waits: tuple[str, ...] = ()
    kind: str = "hang"
    found_s_max: float = PROOF_S_MAX
    ends: str = "SUCCEEDED"
    spec: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def is_long(self) -> bool:
        """Tell whether it takes more than 25 s to be found."""
        return self.found_s_max > 25

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines at fault, as `train.py:LINE`: of a loop it may be each."""
        return lines_at_fault(self.script)


ALL_REDUCE = ("all_reduce", "default group")

CASES = (
    Case(
        "stopped",
        training("""
def misbehave():
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)  # and a stopped process cannot say where it is
""", ddp=True),
        (2,), ("stopped", "rank 2 on node-1"), ALL_REDUCE,
    ),
    Case(
        "endless_loop",
        training("""
def misbehave():
    if rank == 2:
        while True:  # here
            pass  # here
"""),
        (2,), ("misbehave", "rank 2 on node-1"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "endless_loop_that_sleeps",
        training("""
def misbehave():
    if rank == 1:
        while True:
            time.sleep(0.1)  # here
"""),
        (1,), ("in sleep(), in a loop", "misbehave"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "c_loop_holding_the_gil",
        training("""
def misbehave():
    if rank == 1:
        import itertools
        sum(itertools.repeat(1))  # here
"""),
        (1,), ("misbehave", "rank 1 on node-0"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "catastrophic_regex",
        training("""
def misbehave():
    if rank == 3:
        import re
        re.match("(a+)+$", "a" * 64 + "b")  # here
"""),
        (3,), ("misbehave", "rank 3 on node-1"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "long_sleep",
        training("""
def misbehave():
    if rank == 2:
        time.sleep(3600)  # here
""", ddp=True),
        (2,), ("sleep", "misbehave"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "asleep_in_c_code_holding_the_gil",
        training("""
def misbehave():
    if rank == 1:
        import ctypes
        ctypes.PyDLL(None).sleep(3600)
"""),
        (1,), ("in sleep()",), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "deadlock_on_a_lock",
        training("""
lock = threading.Lock()


def load_batch():
    with lock:
        return read_shard()


def read_shard():
    with lock:  # here
        return 1


def misbehave():
    if rank == 2:
        load_batch()
"""),
        (2,), ("lock", "read_shard"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "two_threads_deadlocked",
        training("""
one, other = threading.Lock(), threading.Lock()
both = threading.Barrier(2)


def take(first_lock, second_lock):
    with first_lock:
        both.wait()
        with second_lock:  # here
            pass


def misbehave():
    if rank == 1:
        threading.Thread(target=take, args=(other, one), daemon=True).start()
        take(one, other)
"""),
        (1,), ("lock", "take"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "skips_an_all_reduce",
        training("""
def misbehave():
    if rank != 2:
        dist.all_reduce(torch.ones(10))
    dist.all_gather([torch.zeros(7) for _ in range(4)], torch.ones(7))  # here
"""),
        (2,), ("all_gather", "misbehave"), ("ranks 0-1,3 in all_reduce",),
    ),
    Case(
        "different_collectives",
        training("""
def misbehave():
    if rank == 3:
        dist.broadcast(torch.ones(10), 0)  # here
    else:
        dist.all_reduce(torch.ones(10))
"""),
        (3,), ("broadcast", "misbehave"), ("ranks 0-2 in all_reduce",),
    ),
    Case(
        "buffers_sent_by_rank_0_only",
        training("""
def misbehave():
    inner = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(64))
    inner(torch.ones(4, 64)).sum().backward()
    if rank == 0:
        inner(torch.ones(4, 64))  # here
        inner(torch.ones(4, 64))  # here
"""),
        (0,), ("broadcast", "misbehave"), ("ranks 1-3 in all_reduce",),
    ),
    Case(
        "barrier_in_a_finally",
        training("""
def misbehave():
    if rank == 3:
        try:
            raise ValueError("no data")
        finally:
            dist.barrier()  # here
"""),
        (3,), ("raised ValueError: no data", "barrier", "misbehave"), ("ranks 0-2 in all_reduce",),
    ),
    Case(
        "barrier_on_rank_0_only",
        training("""
def misbehave():
    if rank == 0:
        dist.barrier()  # here
"""),
        (0,), ("barrier", "misbehave"), ("ranks 1-3 in all_reduce",),
    ),
    Case(
        "different_shapes",
        training("""
def misbehave():
    dist.all_reduce(torch.ones(200 if rank == 2 else 100))
"""),
        None, ("different collectives",), kind="crash",  # gloo sees it and aborts a rank, any of them
    ),
    Case(
        "a_skipped_all_reduce_of_equal_shape",
        training("""
def misbehave():
    if rank != 2:
        dist.all_reduce(torch.ones(64 * 64 + 64))  # as large as that of the next step, which takes its place
    train(500)
"""),
        (2,), ("rank 2 on node-1",), kind="desync", ends="FAILED",
    ),
    Case(
        "recv_from_one_who_never_sends",
        training("""
def misbehave():
    if rank == 2:
        dist.recv(torch.ones(10), 3)  # here
"""),
        (2,), ("recv", "misbehave"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "input_with_nobody_there",
        training("""
def misbehave():
    if rank == 2:
        read_end, write_end = os.pipe()
        os.dup2(read_end, 0)
        sys.stdin = open(0)
        input("go on? ")  # here
"""),
        (2,), ("input", "misbehave"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "breakpoint_left_in",
        training("""
def misbehave():
    if rank == 2:
        other_end, terminal = os.openpty()
        os.dup2(terminal, 0)
        sys.stdin = open(0)
        breakpoint()  # here
        print("after it")  # here
"""),
        (2,), ("pdb", "misbehave"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "fifo_nobody_writes",
        training("""
def load_batch(path):
    os.mkfifo(path)
    with open(path, "rb", buffering=0) as file:  # here
        return file.read()


def misbehave():
    if rank == 2:
        load_batch("shard-17.bin")
"""),
        (2,), ("shard-17.bin", "load_batch"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "open_fifo_nobody_writes",
        training("""
def load_batch(path):
    os.mkfifo(path)
    file = os.fdopen(os.open(path, os.O_RDWR), "rb", buffering=0)
    return file.read(4096)  # here


def misbehave():
    if rank == 2:
        load_batch("shard-17.bin")
"""),
        (2,), ("shard-17.bin", "load_batch"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "dataloader_worker_stopped",
        training("""
class Shards(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def misbehave():
    if rank == 2:
        for batch in torch.utils.data.DataLoader(Shards(), num_workers=1, collate_fn=list):  # here
            pass
"""),
        (2,), ("worker", "in state T", "misbehave"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "dataloader_worker_asleep",
        training("""
class Shards(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 7:
            time.sleep(3600)
        return index


def misbehave():
    if rank == 2:
        for batch in torch.utils.data.DataLoader(Shards(), num_workers=1, collate_fn=list):  # here
            pass
"""),
        (2,), ("misbehave",), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "waits_for_a_child_that_is_stopped",
        training("""
def misbehave():
    if rank == 2:
        subprocess.run(["sh", "-c", "kill -STOP $$"])  # here
"""),
        (2,), ("child", "misbehave"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "finished_early",
        training("""
def misbehave():
    if rank == 3:
        os._exit(0)
    dist.distributed_c10d._get_default_store().wait(["batch of rank 3"])
"""),
        (3,), ("rank 3 on node-1", "ended"), **UNPROVED,
    ),
    Case(
        "finished_early_and_closed_its_sockets",
        training("""
def misbehave():
    if rank == 3:
        dist.destroy_process_group()
        sys.exit(0)
"""),
        (3,), ("exited with code 0 before it: rank 3",), kind="crash",  # gloo tells the others at once
    ),
    Case(
        "never_exits",
        training("""
def leave():
    if rank == 2:
        import ctypes
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc.pause, None, None)  # as a deadlock in a destructor of C++
"""),
        (2,), ("finished its script", "rank 2"), **UNPROVED,
    ),
    Case(
        "a_thread_keeps_it_alive",
        training("""
def leave():
    if rank == 2:
        threading.Thread(target=time.sleep, args=(3600,)).start()
"""),
        (2,), ("rank 2 on node-1", "waits for its other threads to end"), **UNPROVED,
    ),
    Case(
        "asleep_in_an_import",
        training("""
def arrive():
    if rank == 3:
        import slow_library
"""),
        (3,), ("rank 3 on node-1", "sleep", "slow_library.py:2"), found_s_max=START_S_MAX + 20.0,
        spec={"monitor": {"hang_timeout": 20}},
        files={"slow_library.py": "import time\ntime.sleep(3600)\n"},
    ),
    Case(
        "one_never_comes_to_the_rendezvous",
        training("""
def arrive():
    while rank == 3:
        time.sleep(0.5)  # here
"""),
        (3,), ("rank 3", "node-1"), ("ranks 0-2",), kind="rendezvous", found_s_max=51.0,
        # On a busy machine the import of torch takes a third of it.
        spec={"monitor": {"rendezvous_timeout": 45}},
    ),
    Case(
        "a_file_lock_that_a_waiting_rank_holds",
        training("""
import fcntl


def misbehave():
    if rank == 3:
        global held
        held = open("cache.lock", "w")
        fcntl.flock(held, fcntl.LOCK_EX)
    dist.barrier()
    if rank == 2:
        with open("cache.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # here
"""),
        (2,), ("in flock() of cache.lock", "misbehave"), ALL_REDUCE, **UNPROVED,
    ),
    Case(
        "asleep_without_torch",
        plain("""
if attempt == 1 and rank == 2:
    time.sleep(3600)  # here
time.sleep(1)
"""),
        (2,), ("sleep", "rank 2 on node-1"), found_s_max=START_S_MAX, spec={"monitor": {"hang_timeout": 20}},
    ),
)  # fmt: skip
