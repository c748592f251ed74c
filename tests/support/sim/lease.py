"""What does a queue system lend in a night, for how long, and what does it do besides? Drawn here; nothing runs."""

from __future__ import annotations

import random
from dataclasses import dataclass

FOR_EVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class Lease:
    """How a cluster of `count` nodes lends some to the job.

    `wait_s`: how long it waits in the queue each time; `stay_s`: for how long it has its nodes; `kill_s`: from TERM to
    KILL; `noticed_s`: after how long a node that is lost is known to be; `term_kills`: ranks die of TERM.
    """

    count: int
    spares: int = 0
    requeues: bool = True
    grace_s: float = 6.0
    wait_s: tuple[float, float] = (1.0, 10.0)
    stay_s: float = FOR_EVER_S
    kill_s: float = 10.0
    noticed_s: tuple[float, float] = (5.0, 25.0)
    term_kills: bool = False
    tells: bool = False  # when KILL comes after TERM
    mixes: bool = False  # other nodes each time, not the first ones that are free


def random_lease(rng: random.Random, nodes: int) -> Lease:
    """Return what is lent to a job of so many nodes."""
    spares = rng.choice((0, 0, 1, 2))
    return Lease(
        nodes + spares + rng.choice((1, 2, 3)), spares, requeues=rng.random() < 0.6,
        grace_s=rng.choice((2.0, 6.0, 20.0)), wait_s=rng.choice(((0.5, 5.0), (5.0, 60.0))),
        stay_s=rng.choice((FOR_EVER_S, FOR_EVER_S, rng.uniform(60.0, 90.0), rng.uniform(90.0, 200.0))),
        kill_s=rng.choice((5.0, 30.0)), noticed_s=rng.choice(((1.0, 5.0), (10.0, 30.0))),
        term_kills=rng.random() < 0.5, mixes=rng.random() < 0.5,
        tells=rng.random() < 0.5,
    )  # fmt: skip
