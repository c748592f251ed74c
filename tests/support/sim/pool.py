"""What is there of hosts, in a night on a pool of them? Which refuse, which others use, who reaches whom; drawn here.

Hosts are numbers, in the user's order. Nothing here runs.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

FOR_EVER_S = float("inf")
BRIDGE = "172.17.0.1"
"""An address that every host has, and that leads only to itself: docker's bridge."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Another job wants a host for a time; it has it unless this job was there first and stays."""

    host: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a night, of which the job takes some.

    `nets` says for each host on which networks it is, each named by a letter; empty: all on one. `ahead`: when each of
    the earlier jobs leaves the queue. `copy_s`: how long a checkpoint takes on its way home; 0: the disk is shared.
    """

    count: int
    spares: int = 0
    bad: tuple[int, ...] = ()  # refuse every new connection: a wrong key
    unfit: tuple[int, ...] = ()  # the setup lines fail there
    stuck: tuple[int, ...] = ()  # the setup lines never end there
    busy: tuple[Busy, ...] = ()
    ahead: tuple[float, ...] = ()
    nets: tuple[str, ...] = ()
    bridge: bool = False
    copy_s: tuple[float, float] = (0.0, 0.0)
    copies_fail: float = 0.0

    @property
    def travels(self) -> bool:
        """Tell whether checkpoints have to come home."""
        return self.copy_s[1] > 0

    @property
    def calm_s(self) -> float:
        """When other jobs have gone, except those that stay for ever."""
        return max([0.0, *self.ahead, *(one.until_s for one in self.busy if one.until_s < FOR_EVER_S)])

    def networks(self, host: int) -> str:
        return self.nets[host] if self.nets else "a"

    def is_busy(self, host: int, from_s: float, until_s: float) -> bool:
        """Tell whether another job wants the host at some time of this span."""
        return any(one.host == host and one.from_s <= until_s and from_s < one.until_s for one in self.busy)


def random_hosts(rng: random.Random, nodes: int) -> Hosts:
    """Return hosts for a job of so many nodes: mostly a few more than it needs, and mostly one thing wrong."""
    count = nodes + rng.choice((0, 1, 1, 2, 3, 4))
    hosts = Hosts(count, spares=min(count - nodes, rng.choice((0, 0, 1, 1, 2))), bridge=rng.random() < 0.4)
    if rng.random() < 0.5:
        travel_s = rng.choice(((0.5, 5.0), (5.0, 60.0), (20.0, 200.0)))
        hosts = dataclasses.replace(hosts, copy_s=travel_s, copies_fail=rng.choice((0.0, 0.2)))
    wrongs = (
        _some_bad,
        _some_bad,
        _some_busy,
        _some_busy,
        _in_turns,
        _jobs_ahead,
        _two_nets,
        _one_alone,
        _one_unfit,
    )
    for _ in range(rng.choice((0, 1, 1, 2))):
        hosts = rng.choice(wrongs)(rng, hosts)
    return hosts


def _some_bad(rng: random.Random, hosts: Hosts) -> Hosts:
    bad = rng.sample(range(hosts.count), min(hosts.count, rng.choice((1, 1, 1, 1, 2, 2, 9))))
    return dataclasses.replace(hosts, bad=tuple(sorted(bad)))


def _some_busy(rng: random.Random, hosts: Hosts) -> Hosts:
    some = []
    for host in range(hosts.count):
        if rng.random() < 0.5:
            from_s = rng.choice((0.0, rng.uniform(0.0, 120.0)))
            some.append(Busy(host, from_s, from_s + rng.choice((rng.uniform(3.0, 60.0), rng.uniform(60.0, 400.0)))))
    return dataclasses.replace(hosts, busy=(*hosts.busy, *some))


def _in_turns(rng: random.Random, hosts: Hosts) -> Hosts:
    """Another job that cannot get all it wants takes and leaves hosts again and again."""
    turn_s, turns = rng.uniform(2.0, 12.0), rng.randint(4, 20)
    some = [
        Busy(host, turn * turn_s, (turn + 1) * turn_s)
        for turn in range(turns)
        for host in range(hosts.count)
        if rng.random() < 0.5
    ]
    return dataclasses.replace(hosts, busy=(*hosts.busy, *some))


def _jobs_ahead(rng: random.Random, hosts: Hosts) -> Hosts:
    ahead = tuple(rng.uniform(1.0, 150.0) for _ in range(rng.randint(1, 3)))
    return dataclasses.replace(hosts, ahead=ahead)


def _two_nets(rng: random.Random, hosts: Hosts) -> Hosts:
    return dataclasses.replace(hosts, nets=tuple(rng.choice(("a", "ab", "ab", "ba", "b")) for _ in range(hosts.count)))


def _one_alone(rng: random.Random, hosts: Hosts) -> Hosts:
    alone = rng.randrange(hosts.count)
    return dataclasses.replace(hosts, nets=tuple("z" if host == alone else "a" for host in range(hosts.count)))


def _one_unfit(rng: random.Random, hosts: Hosts) -> Hosts:
    one = (rng.randrange(hosts.count),)
    return dataclasses.replace(hosts, stuck=one) if hosts.bridge else dataclasses.replace(hosts, unfit=one)
