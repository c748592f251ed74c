"""Stand-ins for the agents of a large job, all in one process: they speak the agents' protocol over TLS and start nothing.

`python -m bench.stand_ins FOLDER FIRST COUNT`. Each has a loopback address of its own, as hosts have, answers orders, and
says each second that its ranks make a step a second. `arrivals.jsonl` in the job folder has the time of each order,
`steps.jsonl` that of the first heartbeat with each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import ssl
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core import observations as seen
from orchestrator.core.jobdir.durable import LINE_BYTES_MAX
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.wire import connection, orders, reports
from orchestrator.supervisor import translation
from tests.support.frames import frame

PER_NODE = 8
BEAT_S = 1.0
TICK_S = 0.01
ANSWER_S = 0.5
"""How long ranks take to stop, and an inspection takes. So the time at which an order arrives is not that at which this one
process has answered for all nodes before."""
OWN_WORK_S = 10.0
REDIAL_S_MIN, REDIAL_S_MAX = 0.1, 2.0
CONNECT_S_MAX = 10.0

_ORDERS = codec.classes_by_kind(orders.Order)
_FRAMES = tuple(f"/work/code/package/module_{frame}.py:{100 + frame} function_{frame}" for frame in range(20))


@dataclass(slots=True)
class Gang:
    """What the stand-ins of one process share: since when all nodes of an attempt run, and the files of times."""

    job: JobDir
    size: int
    started: dict[int, set[str]] = field(default_factory=dict)
    began_s: dict[int, float] = field(default_factory=dict)
    step: int = 0
    world: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.world = tuple(range(self.size * PER_NODE))

    def start(self, attempt: int, node: str) -> None:
        """Note that a node's ranks run; steps begin with the last one."""
        names = self.started.setdefault(attempt, set())
        names.add(node)
        if len(names) == self.size:
            self.began_s.setdefault(attempt, time.time())

    def steps(self, attempt: int) -> int:
        """Return how many steps every rank has made, and note the time of a new one."""
        began_s = self.began_s.get(attempt)
        steps = int(time.time() - began_s) if began_s is not None else 0
        if steps > self.step or steps == 0:
            self.step = steps
            if steps:
                self.write("steps.jsonl", {"attempt": attempt, "step": steps, "at": time.time()})
        return steps

    def write(self, name: str, line: dict[str, object]) -> None:
        """Append one line."""
        with (self.job.root / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


class Node:
    """One stand-in: its connection, its outbox, and what it pretends to run."""

    def __init__(self, gang: Gang, index: int, token: str) -> None:
        self._gang, self._index, self._token = gang, index, token
        self.name = f"node-{index}"
        self._line: connection.PeerConnection | None = None
        self._kept: dict[int, reports.ReliableReport] = {}
        self._seq = self._beats = self._attempt = self._ready = 0
        self._ranks: tuple[int, ...] = ()
        self._prepared: orders.PrepareNode | None = None
        self.is_dismissed = False

    async def keep(self, context: ssl.SSLContext) -> None:
        """Dial, and dial again, until dismissed."""
        pause_s, octets = REDIAL_S_MIN, (self._index // 250, self._index % 250 + 1)
        while not self.is_dismissed:
            with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):
                host, port = connection.parse_address(self._gang.job.endpoint.read_text().split()[0])
                opening = asyncio.open_connection(
                    host, port, ssl=context, server_hostname="orch", limit=LINE_BYTES_MAX,
                    local_addr=(f"127.1.{octets[0]}.{octets[1]}", 0),
                )  # fmt: skip
                self._line = connection.PeerConnection(*await asyncio.wait_for(opening, CONNECT_S_MAX))
                self._greet()
                while True:
                    data, _ = await self._line.receive()
                    order, _ = connection.take_message(data, _ORDERS)
                    pause_s = REDIAL_S_MIN
                    self._obey(order)
            if self._line is not None:
                self._line.writer.close()
                self._line = None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, REDIAL_S_MAX)

    def _greet(self) -> None:
        assert self._line is not None
        ranks = tuple(seen.ReportedRank(rank, 1000 + rank, False) for rank in self._ranks)
        running = self._attempt if self._ranks else 0
        hello = reports.Hello(
            reports.PROTOCOL, self._gang.job.id, self._token, self.name, f"boot-{self._index}", self.name, 7, running, self._ready,
            "10.0.0.1", 29500, ranks, len(self._kept), str(self._gang.job.root), False, (),
        )  # fmt: skip
        self._line.send(hello)
        for seq, report in self._kept.items():
            self._line.send(report, seq)

    def _report(self, report: reports.ReliableReport) -> None:
        self._seq += 1
        self._kept[self._seq] = report
        if self._line is not None:
            with contextlib.suppress(connection.PeerError):
                self._line.send(report, self._seq)

    def _obey(self, order: orders.Order) -> None:
        if isinstance(order, orders.Ack):
            for seq in [seq for seq in self._kept if seq <= order.seq]:
                del self._kept[seq]
            return
        attempt = getattr(order, "attempt", 0)
        self._gang.write("arrivals.jsonl", {"order": type(order).__name__, "attempt": attempt, "at": time.time()})
        match order:
            case orders.PrepareNode():
                self._ready, self._prepared = attempt, order
                is_probed = order.nodes[0] == self.name and len(order.nodes) > 1
                addresses = (seen.Address("10.0.0.1", "eth0"),) if is_probed else ()
                self._report(reports.Prepared(attempt, "10.0.0.1", 29500, addresses))
            case orders.Probe():
                reached = tuple(seen.ReachableAddress(address, "eth0") for address in order.addresses)
                self._report(reports.Probed(attempt, reached, ()))
            case orders.Start():
                assert self._prepared is not None
                plan, nodes = self._prepared.plan, self._prepared.nodes
                at = NodePlan(plan, self._gang.job, self.name, attempt, nodes)
                self._attempt, self._ranks = attempt, at.ranks
                self._report(reports.Started(attempt, tuple(1000 + rank for rank in self._ranks), "fresh"))
                self._gang.start(attempt, self.name)
            case orders.Stop():
                asyncio.get_running_loop().call_later(ANSWER_S, self._stopped, attempt)
            case orders.Inspect():
                asyncio.get_running_loop().call_later(ANSWER_S, self._inspected, attempt, order.inspection)
            case orders.Dismiss():
                self.is_dismissed = True
                if self._line is not None:
                    self._line.send(reports.Goodbye())
                    self._line.writer.close()
            case _:
                pass

    def _stopped(self, attempt: int) -> None:
        steps = self._gang.steps(self._attempt)
        for rank in self._ranks:
            self._report(reports.Exited(self._attempt, rank, None, 15, steps, None, False, True))
        self._ranks = ()
        self._report(reports.Stopped(attempt, "asked"))

    def _inspected(self, attempt: int, inspection: int) -> None:
        self._report(
            reports.Inspected(attempt, inspection, tuple(_inspection(rank, self._gang) for rank in self._ranks))
        )

    def beat(self) -> None:
        """Send a heartbeat, if there is a connection."""
        if self._line is None or self.is_dismissed:
            return
        steps, now_s = self._gang.steps(self._attempt), time.time()
        self._beats += 1
        ranks = tuple(_heartbeat(rank, steps, now_s) for rank in self._ranks)
        with contextlib.suppress(connection.PeerError):
            self._line.send(reports.Heartbeat(self._attempt, ranks, self._beats))


def _heartbeat(rank: int, steps: int, now_s: float) -> reports.RankHeartbeat:
    """Return what an agent says of a rank of a DDP job."""
    own_s = 0.61 + (rank * 7919 + int(now_s / OWN_WORK_S)) % 97 / 1000
    return reports.RankHeartbeat(
        rank, steps, "R", 120 * steps, round(11.7 * steps, 2), io_bytes=93_571 * steps,
        median_step_s=1.0 + rank % 13 / 1000, own_work_s=own_s if steps > 5 else None, groups=("0123456789abcdef",),
        collective_counts=(seen.CollectiveCounts(steps, 0, steps, (12 * steps,)),) if steps else (), optimizer_steps=steps,
        rate_per_s=1.0,
    )  # fmt: skip


def _inspection(rank: int, gang: Gang) -> seen.RankInspection:
    last = seen.Collective(
        "0", "default group", gang.world, 12 * gang.step, "all_reduce", "float32[1000000]", 0.1, True
    )
    return seen.RankInspection(
        rank, 1000 + rank, "R", seen.Activity.PROGRESSING, 0.0, frame(_FRAMES[0]), "computes", "train", _FRAMES,
        (last,), (), (), (), gpu_use=0.9,
    )  # fmt: skip


async def run(job: JobDir, first: int, count: int) -> None:
    """Be so many nodes until all are dismissed, or until the process is ended."""
    secrets = translation.read_secrets(job)
    context = connection.client_context(secrets.certificate)
    size = len(codec.loads(Plan, job.plan.read_bytes()).nodes)
    gang = Gang(job, size)
    nodes = [Node(gang, index, secrets.token) for index in range(first, first + count)]
    tasks = [asyncio.create_task(node.keep(context)) for node in nodes]
    due_s, turn = time.monotonic(), 0
    while not all(node.is_dismissed for node in nodes):
        while due_s <= time.monotonic():  # the beats of a second are spread over it
            nodes[turn % count].beat()
            turn, due_s = turn + 1, due_s + BEAT_S / count
        await asyncio.sleep(TICK_S)
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(run(JobDir(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()
