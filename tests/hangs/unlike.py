"""Which jobs whose ranks do unlike things look like a hang, or like a desync, and are none? See `innocents`."""

from __future__ import annotations

from .innocents import Innocent
from .script import plain, training

UNLIKE = (
    Innocent(
        "join_over_epochs_of_uneven_length",
        training("""
from torch.distributed.algorithms.join import Join


def misbehave():
    inner = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    own = torch.optim.SGD(inner.parameters(), lr=0.01)
    for epoch in range(3):
        with Join([inner]):
            for _ in range(100 - 2 * (rank == 2)):
                inner(torch.ones(4, 64)).sum().backward()
                own.step()
                own.zero_grad()
                time.sleep(0.02)
"""),
        20,
    ),
    Innocent(
        "rank_0_receives_metrics_from_the_others",
        training("""
def misbehave():
    for _ in range(4):
        train(50)
        if rank == 0:
            for source in (1, 2, 3):
                dist.recv(torch.ones(3), source)
        else:
            dist.send(torch.ones(3), 0)
"""),
        20,
    ),
    Innocent(
        "a_rank_without_steps_is_late_with_its_samples",
        plain("""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
trainers = dist.new_group([0, 1, 2])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(90):
    if rank == 3 and step == 60:
        subprocess.run(["sleep", "20"])
    batch = torch.ones(4, 64)
    dist.broadcast(batch, 3)
    if rank != 3:
        model(batch).sum().backward()
        for one in model.parameters():
            dist.all_reduce(one.grad, group=trainers)
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(0.03)
dist.barrier()
dist.destroy_process_group()
"""),
        30,
    ),
    Innocent(
        "a_pipeline_whose_feeding_thread_is_late",
        training("""
def feed(number):
    for one in range(number):
        if one == 2:
            time.sleep(20)
        dist.send(torch.full((100,), float(one)), 1)


def misbehave():
    got = torch.zeros(100)
    if rank == 0:
        threading.Thread(target=feed, args=(5,)).start()
        for _ in range(5):
            dist.recv(got, 3)
    else:
        for _ in range(5):
            dist.recv(got, rank - 1)
            dist.send(got + 1, (rank + 1) % 4)
"""),
        30,
    ),
)
