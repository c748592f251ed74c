"""A short way to tell the brain a story: events in, decisions out. For the tests of its rules."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from orchestrator.brain.brain import Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointState,
    Content,
    FileLocation,
    Format,
    StepSource,
)
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.plan_types import Limits, PlannedNode, PlannedPool, QueueTerms
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.journal.journal_file import unwrap_message
from tests.support.frames import frame

D = TypeVar("D")
Given = TypeVar("Given", bound=orders.NodeOrder)
LIMITS = Limits(60.0, 30.0, 20.0, 12.0, 5.0, 1.0, 3, 2.0, 16.0, (), None, "restart")
IP = "10.0.0.9"
OWN = observations.Failure("ValueError", "loss is nan", "Traceback", frame("train.py:42"))
VICTIM = observations.Failure("RuntimeError", "Connection closed by peer", "Traceback", frame("train.py:50"))


def planned_node(name: str, *ranks: int) -> PlannedNode:
    """Return a node of a plan as the brain sees it."""
    return PlannedNode(name, "", "", (), ranks)


class Story:
    """A job of `nodes` nodes with one rank each; every word makes the brain look until it has no more to say.

    With `hosts` it is one on a pool of so many hosts, n0 and so on; with `queue` they are an allocation. Every save that
    is compared is as its ledger says, at once, unless `compares` is False.
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        hosts: int = 0,
        spares: int = 0,
        queue: QueueTerms | None = None,
        begins: bool = True,
        **limits: object,
    ) -> None:
        """`begins`: the brain is asked at once, and the first attempt begins."""
        self.brain = Brain()
        self.now_s = self.wake_s = 0.0
        self.said: list[d.Decision] = []
        self.compares = True
        self.limits = dataclasses.replace(LIMITS, **limits)  # type: ignore[arg-type]
        self.hosts, self.spares, self.queue = hosts, spares, queue
        if queue is not None:
            self.brain.learn(e.AllocationBegan(0.0, "7.0"))
        if begins:
            self.hear(self.planned(nodes))
        else:
            self.brain.learn(self.planned(nodes))

    def planned(self, nodes: int) -> e.Planned:
        if self.hosts:
            there = tuple(planned_node(f"n{i}") for i in range(self.hosts))
            return e.Planned(0.0, there, self.limits, self.pool(nodes))
        return e.Planned(0.0, tuple(planned_node(f"n{i}", i) for i in range(nodes)), self.limits, None)

    def pool(self, nodes: int) -> PlannedPool:
        return PlannedPool(nodes, 1, 0, self.spares, queue=self.queue)

    def hear(self, *news: e.Event) -> list[d.Decision]:
        """Tell events at the present time; return all that the brain decides on them."""
        for event in news:
            self.brain.learn(dataclasses.replace(event, at=self.now_s))
        decided: list[d.Decision] = []
        for _ in range(20):
            decisions, self.wake_s = self.brain.decide(self.now_s)
            if not decisions:
                self.said += decided
                return decided
            decided += decisions
            for decision in decisions:
                self.brain.learn(decision)
                if isinstance(decision, d.CompareCheckpoint) and self.compares:
                    self.brain.learn(self.compared(decision))
        raise AssertionError(f"no end of decisions: {decided}")

    def lent(self, allocation: str, *nodes: int) -> list[d.Decision]:
        """Another allocation begins, of these nodes, and a supervisor in it."""
        assert self.queue is not None
        there = tuple(planned_node(f"n{node}") for node in nodes)
        planned = e.Planned(self.now_s, there, self.limits, self.pool(2))
        for news in (e.AllocationBegan(self.now_s, allocation), planned):
            self.brain.learn(news)
        return self.hear(e.SupervisorStarted(0.0, 1))

    def wait(self, seconds: float) -> list[d.Decision]:
        """Let time pass without any word; the brain is asked at its deadlines only."""
        until_s = self.now_s + seconds
        decided: list[d.Decision] = []
        while self.wake_s <= until_s:
            self.now_s = max(self.now_s, self.wake_s)
            decided += self.hear()
        self.now_s = until_s
        return decided

    def up(self, node: int, running: int = 0, ready: int = 0, boot: str = "a") -> e.AgentUp:
        return e.AgentUp(0.0, f"n{node}", boot, running, ready, "10.0.0.1" if ready else "", 5000 if ready else 0, ())

    def prepared(self, node: int, attempt: int = 1, *ips: str) -> e.FromNode:
        addresses = tuple(observations.Address(ip, f"eth-{ip}") for ip in ips)
        return e.FromNode(0.0, f"n{node}", reports.Prepared(attempt, "10.0.0.1", 5000 + attempt, addresses))

    def probed(self, node: int, *ips: str, attempt: int = 1, missed: tuple[str, ...] = ()) -> e.FromNode:
        return e.FromNode(
            0.0,
            f"n{node}",
            reports.Probed(attempt, tuple(observations.ReachableAddress(ip, f"via-{ip}") for ip in ips), missed),
        )

    def refused(self, node: int, trouble: observations.Retryable, reason: str = "no") -> e.LaunchFailed:
        return e.LaunchFailed(0.0, f"n{node}", "stage", reason, trouble)

    def run_on(self, *nodes: int, attempt: int = 1) -> None:
        """Bring an attempt of a pool to the point where all ranks run, on these nodes."""
        self.hear(*(self.prepared(node, attempt, IP) for node in nodes))
        self.hear(*(self.probed(node, IP, attempt=attempt) for node in nodes[1:]))
        self.hear(*(e.FromNode(0.0, f"n{node}", reports.Started(attempt, (100 + node,))) for node in nodes))

    def run(self, attempt: int = 1) -> None:
        """Bring an attempt to the point where all ranks run."""
        nodes = range(len(self.brain.facts.nodes))
        if attempt == 1:
            self.hear(*(self.up(node) for node in nodes))
        self.hear(*(self.prepared(node, attempt) for node in nodes))
        self.hear(*(e.FromNode(0.0, f"n{node}", reports.Started(attempt, (100 + node,))) for node in nodes))

    def exited(
        self, rank: int, code: int | None = 1, failure: observations.Failure | None = OWN, *, attempt: int = 1,
        signal: int | None = None, ordered: bool = False, count: int = 0, oom: bool = False,
    ) -> e.FromNode:  # fmt: skip
        return e.FromNode(0.0, f"n{rank}", reports.Exited(attempt, rank, code, signal, count, failure, oom, ordered))

    def beat(self, node: int, count: int, state: str = "S", attempt: int = 1) -> e.FromNode:
        return e.FromNode(0.0, f"n{node}", reports.Heartbeat(attempt, (RankHeartbeat(node, count, state, 0, 0.0),)))

    def looked(self, *looks: observations.RankInspection, attempt: int = 1) -> list[e.FromNode]:
        """Return the answers to the last inspection, one for each node."""
        known = self.brain.facts.attempt
        number = known.inspection if known is not None else 0
        return [e.FromNode(0.0, f"n{one.rank}", reports.Inspected(attempt, number, (one,))) for one in looks]

    def saved(self, step: int, attempt: int = 1, **more: Any) -> e.CheckpointChanged:
        return e.CheckpointChanged(0.0, save(step, attempt, **more))

    def compared(self, order: d.CompareCheckpoint, fault: str = "") -> e.CheckpointCompared:
        return e.CheckpointCompared(self.now_s, order.attempt, order.save, fault)

    def life(self, attempt: int, count: int, *heard: e.Event, failure: observations.Failure = OWN) -> d.Verdict:
        """Let the next attempt of a job of one node run, be heard of, and crash after `count` steps."""
        self.run(attempt)
        self.hear(*heard)
        died = self.exited(0, failure=failure, attempt=attempt, count=count)
        verdict = only(self.hear(died), d.Judge).verdict
        self.stop_all(attempt)
        self.wait(20.0)
        return verdict

    def stopped(self, node: int, attempt: int = 1, how: str = "asked") -> e.FromNode:
        return e.FromNode(0.0, f"n{node}", reports.Stopped(attempt, how))

    def stop_all(self, attempt: int = 1) -> list[d.Decision]:
        return self.hear(*(self.stopped(node, attempt) for node in range(len(self.brain.facts.nodes))))


def save(step: int, attempt: int = 1, **more: Any) -> Checkpoint:
    """Return a whole save of a job that was never resumed; `more` are fields that differ."""
    plain: dict[str, Any] = {
        "number": 1000 * attempt + step, "key": f"#{step}", "series": "#", "main": f"step-{step}.pt", "attempt": attempt,
        "world_size": 1, "steps": step, "format": Format.TORCH, "content": Content.STATE, "fits_any_size": True,
        "state": CheckpointState.WHOLE, "step": step, "step_source": StepSource.COUNTED, "locations": (FileLocation("", "/ckpt"),),
    }  # fmt: skip
    return Checkpoint(**{**plain, **more})


def at(step: int, attempt: int = 1) -> ResumePoint:
    """Return such a save as an attempt is given it."""
    one = save(step, attempt)
    return ResumePoint(one.path, step, one.number)


def only(decisions: list[d.Decision], kind: type[D]) -> D:
    """Return the one decision of a kind."""
    found = [decision for decision in decisions if isinstance(decision, kind)]
    assert len(found) == 1, decisions
    return found[0]


def names(decisions: list[d.Decision], kind: type[d.Launch | orders.NodeOrder]) -> list[str]:
    """Return the nodes of the launches, or of the orders of a kind, in their order."""
    return [one.node for one in decisions if isinstance(one, d.Launch | d.To) and isinstance(unwrap_message(one), kind)]


def given(decisions: list[d.Decision], kind: type[Given]) -> list[tuple[str, Given]]:
    """Return the orders of a kind, each with its node."""
    return [(one.node, one.order) for one in decisions if isinstance(one, d.To) and isinstance(one.order, kind)]


def notices(decisions: list[d.Decision], *topics: d.NoticeTopic) -> list[d.Notice]:
    """Return the notices on some topics."""
    return [one for one in decisions if isinstance(one, d.Notice) and one.topic in topics]


def none_of(decisions: list[d.Decision], kind: type[d.Decision | orders.NodeOrder]) -> bool:
    return not any(isinstance(unwrap_message(decision), kind) for decision in decisions)


def look(
    rank: int, activity: observations.Activity = observations.Activity.UNKNOWN, where: str = "", **more: Any
) -> observations.RankInspection:
    """Return what an inspection has found of a rank, with plain values for what is not given."""
    stack = more.get("stack", ())
    plain: dict[str, Any] = {
        "rank": rank, "pid": 100 + rank, "state": "S", "activity": activity, "still_s": 0.0, "why": "",
        "phase": "", "stack": (), "collectives": (), "groups": (), "collective_counts": (),
        "unavailable": (), "where": frame(where), "inside": stack.index(where) if where in stack else 0,
    }  # fmt: skip
    return observations.RankInspection(**{**plain, **more})
