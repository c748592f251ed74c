"""A scanner of saves with its rank: files and steps of chosen moments in, reports out."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from orchestrator.agent.outputs.checkpoint_memory import CheckpointMemory
from orchestrator.agent.outputs.checkpoint_scanner import CheckpointScanner, Hasher
from orchestrator.agent.ranks import step_counter
from orchestrator.agent.ranks.hook.layout import RING_STEPS, RING_WORD, STEP_FILE_MAGIC, STEP_FILE_VERSION
from orchestrator.agent.ranks.processes import NodeRanks, RankProcess
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.log_index import LogIndex
from orchestrator.core.wire.reports import CheckpointSeen, CheckpointsRead, ReliableReport
from tests.support import fake_host
from tests.support.fake_memory import FakeMemory
from tests.support.saved_files import S, torch_save, write

WAIT_S_MAX = 90.0


@dataclass(slots=True)
class Bench:
    """A scanner with its ranks, and what it has reported and noted."""

    scanner: CheckpointScanner
    ranks: NodeRanks
    beat: Path
    root: Path
    wake: asyncio.Event
    reports: list[ReliableReport] = field(default_factory=list)
    beginnings: list[CheckpointsRead] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    now_s: float = 1000.0
    made: dict[int, int] = field(default_factory=dict)
    # It has made a step since the last save, and makes another one between two looks
    goes_on: bool = True
    # When the attempt began: files are written and steps are made in seconds after it.
    began_ns: int = field(default_factory=lambda: time.time_ns() - 60 * S)

    def at(self, at_s: float) -> int:
        return self.began_ns + int(at_s * S)

    def step(self, count: int, at_s: float) -> None:
        """Let the rank have made so many steps, the last one at that second."""
        self.goes_on = True
        self.made[count] = self.at(at_s)
        words = [0] * RING_STEPS
        for step, time_ns in self.made.items():
            words[step % RING_STEPS] = time_ns
        head = (STEP_FILE_MAGIC | STEP_FILE_VERSION << 32, os.getpid(), count, self.made[count])
        with self.beat.open("r+b") as file:
            file.write(struct.pack(f"<{RING_WORD + RING_STEPS}Q", *head, *[0] * (RING_WORD - 4), *words))

    def save(self, name: str, at_s: float, size_bytes: int = 100) -> None:
        self.goes_on = False
        write(self.root / name, torch_save({"step": 1}, data=os.urandom(size_bytes)), self.at(at_s))

    async def look(self, count: int = 1) -> None:
        """Let the scanner look so many times, and hash all that it has found."""
        for number in range(count):
            if number and self.goes_on and self.made:
                self.step(max(self.made) + 1, 1000.0)
            self.now_s += 1000.0
            before = self.scanner.scans_done
            while True:
                self.wake.clear()
                self.scanner.scan(self.ranks, self.now_s)
                if self.scanner.scans_done > before or not self.is_busy:
                    break
                await asyncio.wait_for(self.wake.wait(), WAIT_S_MAX)
        await self.hash()
        if self.scanner._dump_future is not None:  # what it has seen is on disk by then
            await asyncio.wait_for(asyncio.wrap_future(self.scanner._dump_future), WAIT_S_MAX)

    async def hash(self) -> None:
        while self.scanner._hash_futures:
            self.wake.clear()
            self.scanner.poll()
            if self.scanner._hash_futures:
                await asyncio.wait_for(self.wake.wait(), WAIT_S_MAX)

    async def finish(self) -> None:
        """Let the attempt end."""
        while True:
            self.wake.clear()
            if self.scanner.finish(self.ranks, self.now_s):
                break
            assert self.scanner.is_finishing
            await asyncio.wait_for(self.wake.wait(), WAIT_S_MAX)
        await self.hash()

    @property
    def is_busy(self) -> bool:
        return self.scanner._scan_future is not None or self.scanner._begin_future is not None

    @property
    def seen(self) -> list[CheckpointSeen]:
        return [report for report in self.reports if isinstance(report, CheckpointSeen)]

    @property
    def mains(self) -> list[str]:
        return [report.main for report in self.seen]


def bench(folder: Path, attempt: int = 1, memory: FakeMemory | None = None, **change: Any) -> Bench:
    """Return a scanner that has not begun; `change`: of its agent's configuration."""
    job, wake = JobDir(folder), asyncio.Event()
    config = fake_host.config(**{"root": str(folder), "finds_checkpoints": True, "ships": False, **change})
    run = job.rank_run(config.node, attempt, 0)
    run.mkdir(parents=True, exist_ok=True)
    job.checkpoints.mkdir(exist_ok=True)
    job.attempt_logs(attempt).mkdir(parents=True, exist_ok=True)
    step_counter.create_step_file(run / "beat")
    index = LogIndex(job.rank_index(attempt, 0))
    counter = step_counter.StepCounter(run / "beat")
    process = RankProcess(0, 0, 1, run, job.rank_log(attempt, 0), index, counter)
    reports: list[ReliableReport] = []
    beginnings: list[CheckpointsRead] = []
    notes: list[str] = []

    def report(one: ReliableReport) -> None:
        if isinstance(one, CheckpointsRead):
            beginnings.append(one)
        else:
            reports.append(one)

    held = cast("CheckpointMemory | None", memory)
    scanner = CheckpointScanner(config, Hasher(), report, notes.append, wake, held)
    ranks = NodeRanks(attempt, job, config.node, [process])
    root = memory.folder if memory is not None else job.checkpoints
    return Bench(scanner, ranks, run / "beat", root, wake, reports, beginnings, notes)


def play(folder: Path, act: Callable[[Bench], Awaitable[None]], looks: bool = True, **change: Any) -> Bench:
    """Let `act` meet a scanner whose attempt begins, and whose rank has made a step."""
    own: list[Bench] = []

    async def main() -> None:
        own.append(bench(folder, **change))
        own[0].step(1, 1.0)
        own[0].scanner.begin(own[0].ranks.attempt, looks)
        try:
            await asyncio.wait_for(act(own[0]), WAIT_S_MAX)
        finally:
            own[0].scanner.close()

    asyncio.run(main())
    return own[0]
