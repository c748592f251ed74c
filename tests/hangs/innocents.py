"""What looks like a hang and is none? Data only: `test_healthy_jobs.py` reads it.

Each must end SUCCEEDED in its first attempt, without a verdict and without a notice. The ranks of a case that takes
part in a training go on to train after it, so what was interrupted is whole.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from .script import plain, training


class Deed(enum.Enum):
    """What the test itself does to the job once it is warm."""

    NOTHING = "nothing"
    STOP_SUPERVISOR = "stop_supervisor"  # and let it go on after 15 s
    SET_CLOCK_BACK = "set_clock_back"  # by an hour, for every process of the job


@dataclass(frozen=True, slots=True)
class Innocent:
    """One job that does well; `lasts_s`: how long it takes about, on a quiet machine."""

    name: str
    script: str
    lasts_s: float
    deed: Deed = Deed.NOTHING
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def is_long(self) -> bool:
        return self.lasts_s > 32


INNOCENTS = (
    Innocent(
        "evaluation_on_rank_0_while_others_wait",
        training("""
def misbehave():
    if rank == 0:
        until_s = time.monotonic() + 9
        with torch.no_grad():
            while time.monotonic() < until_s:
                model(torch.ones(256, 64)).sum().item()
    dist.barrier()
"""),
        15,
    ),
    Innocent(
        "evaluation_on_all_ranks",
        training("""
def misbehave():
    until_s = time.monotonic() + 9
    with torch.no_grad():
        while time.monotonic() < until_s:
            model(torch.ones(256, 64)).sum().item()
"""),
        15,
    ),
    Innocent(
        "a_probe_that_one_rank_fits_beside_the_training",
        training("""
def misbehave():
    if rank == 1:  # the others wait for it in their next step
        probe = torch.nn.Linear(64, 64)
        fits = torch.optim.SGD(probe.parameters(), lr=0.1)
        for _ in range(8):
            probe(torch.ones(8, 64)).sum().backward()
            fits.step()
    train(150)
"""),
        12,
    ),
    Innocent(
        "checkpoint_in_pieces_for_30_s",
        training("""
def misbehave():
    if rank == 0:
        with open("big.pt", "wb") as file:
            for _ in range(15):
                torch.save(torch.ones(1 << 18), file)
                file.flush()
                os.fsync(file.fileno())
                time.sleep(2)
        os.unlink("big.pt")
    dist.barrier()
"""),
        36,
    ),
    Innocent(
        "checkpoint_without_a_sign_for_30_s",
        training("""
def misbehave():
    if rank == 0:
        time.sleep(30)
    dist.barrier()
"""),
        36,
    ),
    Innocent(
        "compiles_for_40_s_before_the_first_step",
        training("""
def arrive():
    until_s = time.monotonic() + 40
    text = "def f(x):\\n" + "".join(f"    x = x * {n} + {n}\\n" for n in range(3000)) + "    return x"
    while rank == 1 and time.monotonic() < until_s:
        compile(text, "made.py", "exec")
"""),
        46,
    ),
    Innocent(
        "the_clock_is_set_back_by_an_hour",
        training("""
def misbehave():
    began, until_s, back = time.time(), time.monotonic() + 90, torch.zeros(1)
    print("clock", flush=True)
    while not back.item():
        assert time.monotonic() < until_s, "the clock is not set back"
        train(5)
        back.fill_(time.time() < began - 3000)
        dist.all_reduce(back, dist.ReduceOp.MIN)
    train(250)
"""),
        25, Deed.SET_CLOCK_BACK,
    ),
    Innocent(
        "all_ranks_sleep_for_75_s",
        training("""
def misbehave():
    time.sleep(75)
"""),
        81,
    ),
    Innocent(
        "sleeps_for_25_s_before_the_first_step",
        training("""
def arrive():
    time.sleep(25)
"""),
        31,
    ),
    Innocent(
        "one_rank_comes_40_s_late",
        training("""
def arrive():
    if rank == 2:
        time.sleep(40)
"""),
        46,
    ),
    Innocent(
        "a_step_of_20_s_asleep_on_one_rank",
        training("""
def misbehave():
    if rank == 1:
        time.sleep(20)
"""),
        26,
    ),
    Innocent(
        "tries_again_every_10_s_for_80_s",
        training("""
def misbehave():
    for number in range(8 if rank == 1 else 0):
        try:
            open(f"shard-that-is-not-there-{number}")
        except OSError:
            time.sleep(10)
"""),
        86,
    ),
    Innocent(
        "a_step_of_20_s_asleep_on_all_ranks",
        training("""
def misbehave():
    time.sleep(20)
"""),
        26,
    ),
    Innocent(
        "loader_workers_that_stutter",
        training("""
class Shards(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(8 if index % 8 == 7 else 0.01)
        return [[1.0] * 64] * 4


def misbehave():
    # Lists, since the worker that ends while a tensor of its is taken over breaks torch's own hand-over.
    for batch in torch.utils.data.DataLoader(Shards(), num_workers=1, prefetch_factor=2, collate_fn=list):
        model(torch.tensor(batch[0])).sum().backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()
"""),
        30,
    ),
    Innocent(
        "a_loader_in_the_main_thread_that_stutters",
        training("""
def between(step):
    if step in (20, 50) and rank == 2:
        time.sleep(8)
"""),
        22,
    ),
    Innocent(
        "stopped_for_3_s",
        training("""
def misbehave():
    if rank == 2:
        child = subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        child.wait()
"""),
        10,
    ),
    Innocent(
        "collects_garbage_for_12_s",
        training("""
def misbehave():
    if rank == 2:
        import gc
        held = [[number] for number in range(2_000_000)]
        until_s = time.monotonic() + 12
        while time.monotonic() < until_s:
            gc.collect()
"""),
        20,
    ),
    Innocent(
        "under_heavy_load",
        training("""
def misbehave():
    if rank == 0:
        busy = "import time; end = time.monotonic() + 15\\nwhile time.monotonic() < end: pass"
        children = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(6)]
    train(200)
    if rank == 0:
        for child in children:
            child.wait()
"""),
        30,
    ),
    Innocent(
        "the_supervisor_is_stopped_for_15_s",
        training("""
def misbehave():
    train(500)
"""),
        30, Deed.STOP_SUPERVISOR,
    ),
    Innocent(
        "a_child_works_for_15_s",
        training("""
def misbehave():
    if rank == 0:
        subprocess.run(["sh", "-c", "sleep 15"], check=True)
    dist.barrier()
"""),
        22,
    ),
    Innocent(
        "a_download_that_trickles",
        training("""
def misbehave():
    if rank == 1:
        read_end, write_end = os.pipe()
        script = "import os, time\\nfor _ in range(5): time.sleep(3.5); os.write(1, b'x')"
        child = subprocess.Popen([sys.executable, "-c", script], stdout=write_end)
        os.close(write_end)
        while os.read(read_end, 1):
            pass
        child.wait()
"""),
        24,
    ),
    Innocent(
        "the_main_thread_waits_for_a_thread_that_works",
        training("""
def work():
    until_s = time.monotonic() + 12
    while time.monotonic() < until_s:
        sum(range(1000))


def misbehave():
    if rank == 2:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
"""),
        20,
    ),
    Innocent(
        "rank_0_saves_for_15_s_after_the_others_have_left",
        training("""
def leave():
    if rank == 0:
        time.sleep(15)
"""),
        22,
    ),
    Innocent(
        "uploads_for_15_s_at_exit",
        training("""
import atexit


def leave():
    if rank == 0:
        atexit.register(time.sleep, 15)
"""),
        22,
    ),
    Innocent(
        "only_logs_and_has_no_optimizer",
        plain("""
for number in range(40):
    print("line", number, flush=True)
    time.sleep(0.5)
"""),
        22,
    ),
    Innocent(
        "computes_for_40_s_without_torch_or_a_word",
        plain("""
import hashlib

digest, until_s = b"", time.monotonic() + 40
while time.monotonic() < until_s:
    digest = hashlib.sha256(digest).digest()
"""),
        42, spec={"nodes": 1, "procs_per_node": 2},
    ),
    Innocent(
        "ranks_without_a_group_sleep_for_60_s_after_the_training",
        plain("""
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(80):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    time.sleep(0.03)
time.sleep(60)
"""),
        75, spec={"nodes": 1, "procs_per_node": 2},
    ),
)  # fmt: skip
