"""A desk of saves in its world: a job folder, nodes whose ranks write real files and whose agents report them, and a copier.

Nodes share the job folder, or each is a host with a folder of its own. Nothing happens by itself: tests write, report, let
nodes go on, and end copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointState,
    CompletionReason,
    HostPart,
)
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire import reports
from orchestrator.supervisor.transfers.checkpoint_tracker import CheckpointTracker
from orchestrator.supervisor.transfers.completion import CheckpointGang
from tests.support import fake_host, jobs
from tests.support.fake_copier import FakeCopier
from tests.support.saved_files import SAVED_NS, S, sight, write

THREAD_S_MAX = 20.0

Files = Mapping[str, bytes]


class DeskWorld:
    """A desk, its job and its nodes; `events`: all that the brain has learned, and `facts.saves` what it knows by them."""

    def __init__(self, folder: Path, *nodes: str, has_hosts: bool = False, **plan: object) -> None:
        """`nodes`: those of the attempt. `has_hosts`: each has a disk of its own."""
        self.nodes = nodes or ("n0",)
        self.far = folder / "far"
        self.job = JobDir(folder / "job")
        self.job.checkpoints.mkdir(parents=True, exist_ok=True)
        self.copier = FakeCopier() if has_hosts else None
        base = fake_host.plan() if has_hosts else jobs.plan()
        self.plan: Plan = dataclasses.replace(base, **plan)  # type: ignore[arg-type]
        self.gang = CheckpointGang(1, 0, len(self.nodes), self.nodes)
        self.at = 0.0
        self.now_ns = SAVED_NS
        self.events: list[e.Event] = []
        self.notes: list[str] = []
        self.facts = Facts()
        self._looks = 0
        self.desk = CheckpointTracker(self.job, self.plan, self.copier, lambda: None)
        self.desk.begin(self.facts, self.at)

    def restart(self) -> None:
        """Another supervisor takes over; copies of the first one are no more."""
        self.desk.close()
        if self.copier is not None:
            self.copier.begun.clear()
        self.desk = CheckpointTracker(self.job, self.plan, self.copier, lambda: None)
        self.desk.begin(self.facts, self.at)
        self.learn()

    # What nodes do

    def place(self, node: str = "n0") -> Path:
        """Return where the ranks of a node save."""
        return self.job.checkpoints if self.copier is None else self.far / node / "checkpoints"

    def write(self, files: Files, node: str = "n0", *, replaces: bool = False) -> None:
        """Let a rank write files a second after the last ones, in place or, if it `replaces` them, under another name
        first."""
        self.now_ns += S
        for name, data in files.items():
            path = self.place(node) / name
            new = write(path.with_name(f"{path.name}.new") if replaces else path, data, self.now_ns)
            new.rename(path)

    def seen(self, name: str, node: str = "n0", steps: int = 10, **part: object) -> reports.CheckpointSeen:
        """Return what the agent of a node reports of the save that has this file or folder."""
        found = sight(self.place(node))
        key = found.of(name)
        group = found.groups[key]
        pieces = tuple(found.tree.files[one] for one in sorted(group.names))
        whole = HostPart(node, str(self.place(node)), steps, pieces, found.readings[key], CompletionReason.STEPS)
        part_ = dataclasses.replace(whole, **part)  # type: ignore[arg-type]
        return reports.CheckpointSeen(self.gang.attempt, group.key, group.series, group.main, part_)

    def report(self, name: str, node: str = "n0", steps: int = 10, **part: object) -> reports.CheckpointSeen:
        """Let the agent of a node report a save, and then hash it."""
        seen = self.seen(name, node, steps, **part)
        self.desk.enter_report(self.at, node, seen, self.gang)
        self.hash(seen, node)
        return seen

    def hash(self, seen: reports.CheckpointSeen, node: str = "n0") -> None:
        """Let the agent of a node hash what it has reported, as far as it is still there."""
        pieces = disk.hash_files(Path(seen.part.root), seen.part.files)
        if pieces is not None:
            self.desk.enter_hashes(self.at, node, reports.CheckpointHashed(seen.attempt, seen.key, pieces))
        self.learn()

    def save(self, files: Files, steps: int = 10, node: str = "n0", *, replaces: bool = False) -> Checkpoint:
        """Let a node write a save, report it and hash it, and all nodes go on; return it as it is then."""
        self.write(files, node, replaces=replaces)
        seen = self.report(next(iter(files)), node, steps)
        self.go_on()
        self.settle()
        return self.latest(seen.key)

    def go_on(self, *nodes: str) -> None:
        """All nodes, or these, make steps, and their agents look and see nothing new."""
        for _ in range(2):
            self._looks += 2
            for node in nodes or self.nodes:
                self.beat(node, self._looks)

    def beat(self, node: str, count: int, *, has_unfinished: bool = False, looks: int = 0) -> None:
        """Let a node report `count` steps, and as many looks unless these are given."""
        ranks = (reports.RankHeartbeat(self.nodes.index(node), count, "S", 0, 0.0),)
        heartbeat = reports.Heartbeat(self.gang.attempt, ranks, count, looks or count, has_unfinished)
        self.desk.enter_heartbeat(self.at, node, heartbeat, self.gang)
        self.learn()

    def exit(self, node: str, code: int = 1, *, ordered: bool = False) -> None:
        """The rank of a node ends."""
        rank = self.nodes.index(node)
        self.desk.enter_event(
            e.FromNode(self.at, node, reports.Exited(self.gang.attempt, rank, code, None, 0, None, ordered, False))
        )
        if code == 0 and not ordered:
            self.gang = dataclasses.replace(self.gang, done=self.gang.done | {node})

    def stop(self, *nodes: str) -> None:
        """All nodes, or these, have stopped the attempt."""
        self.gang = dataclasses.replace(self.gang, stopped=self.gang.stopped | set(nodes or self.nodes))
        self.desk.close_stopped(self.at, self.gang)
        self.learn()

    def lose(self, *nodes: str) -> None:
        """These nodes are lost with the attempt."""
        self.gang = dataclasses.replace(self.gang, lost=self.gang.lost | set(nodes))
        self.desk.close_stopped(self.at, self.gang)
        self.learn()

    # What the supervisor does

    def learn(self) -> list[e.Event]:
        """Learn what is new, as the brain does."""
        self.at += 1.0
        news = self.desk.take_events(self.at)
        for event in news:
            if isinstance(event, e.CheckpointChanged):
                self.facts.checkpoints[event.save.number] = event.save
        self.events += news
        self.notes += self.desk.notes
        self.desk.notes.clear()
        return news

    def settle(self) -> None:
        """Wait until the desk's thread has done all, and learn what came of it."""
        self.learn()
        while self.desk._thread._tasks:
            self.desk._thread._tasks[0][0].exception(THREAD_S_MAX)
            self.learn()

    def compare(self, number: int = 0, *, deep: bool = False) -> str:
        """Compare a save before the next attempt, and return its fault."""
        attempt = self.gang.attempt
        self.desk.compare(self.at, d.CompareCheckpoint(self.at, "why", attempt, number, deep))
        self.settle()
        (compared,) = [event for event in self.events if isinstance(event, e.CheckpointCompared)][-1:]
        assert (compared.attempt, compared.save) == (attempt, number)
        return compared.fault

    def attempt(self, number: int, *nodes: str, base_step: int = 0) -> None:
        """Another attempt begins."""
        self.nodes = nodes or self.nodes
        self.gang = CheckpointGang(number, base_step, len(self.nodes), self.nodes)

    def arrive(self, which: str = "", error: str = "") -> None:
        """End the copy of this key or host, or all of them."""
        assert self.copier is not None
        self.copier.arrive(which, error) if which else self.copier.arrive_all()
        self.learn()

    # What there is

    @property
    def saves(self) -> dict[int, Checkpoint]:
        return self.desk.checkpoints

    def latest(self, key: str = "") -> Checkpoint:
        """Return the last save, or the last one of this key."""
        return [save for save in self.saves.values() if key in ("", save.key)][-1]

    def states(self) -> list[CheckpointState]:
        """Return the states of all saves, in the order of their numbers."""
        return [self.saves[number].state for number in sorted(self.saves)]

    def told(self, number: int) -> list[CheckpointState]:
        """Return the states of a save that the brain was told of, one after the other."""
        changes = [event.save for event in self.events if isinstance(event, e.CheckpointChanged)]
        return [save.state for save in changes if save.number == number]

    def home(self) -> Files:
        """Return what is in the checkpoint folder at home, but for what is ours."""
        return {
            str(path.relative_to(self.job.checkpoints)): path.read_bytes()
            for path in sorted(self.job.checkpoints.rglob("*"))
            if path.is_file() and path != self.job.ledger and disk.KEPT_FOLDER not in path.parts
        }

    def kept(self) -> list[str]:
        """Return the numbers of the saves that are kept twice."""
        folder = self.job.checkpoints / disk.KEPT_FOLDER
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
