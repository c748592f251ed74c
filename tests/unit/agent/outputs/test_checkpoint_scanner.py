"""The checkpoint scanner: every checkpoint is reported once, and `reported_through_step` claims no more than that."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.agent.outputs import checkpoint_scanner as scanner_module
from orchestrator.agent.outputs.checkpoint_scanner import LOCK_FILE, NOT_KNOWN, SCAN_S, CheckpointScanner
from orchestrator.agent.outputs.manifest import Hasher
from orchestrator.agent.rank import step_counter
from orchestrator.agent.rank.hook import RING_STEPS, RING_WORD, STEP_FILE_MAGIC, STEP_FILE_VERSION
from orchestrator.agent.start.processes import NodeRanks, RankProcess
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.log_index import LogIndex
from orchestrator.core.wire import messages as m

CONFIG = m.AgentConfig(
    job="job-1", node="n0", root="", token="t", certificate="c", address="a:1", heartbeat_s=1.0, fence_s=9.0,
    checkpoint_glob="*", checkpoint_keep=None, finds_checkpoints=False, ships=True, needs=m.Needs(0, 0, 0),
)  # fmt: skip


@dataclass(slots=True)
class Bench:
    """A scanner, its ranks, and what it has reported."""

    scanner: CheckpointScanner
    ranks: NodeRanks
    beat: Path
    checkpoints: Path
    reports: list[m.ReliableReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    now_s: float = 1000.0
    times_ns: dict[int, int] = field(default_factory=dict)

    def steps(self, count: int) -> None:
        """Let the rank have made so many steps, the last one now, the others before everything unless `times_ns` tells."""
        words = [1] * RING_STEPS
        for step, time_ns in {count: time.time_ns(), **self.times_ns}.items():
            words[step % RING_STEPS] = time_ns
        magic = STEP_FILE_MAGIC | STEP_FILE_VERSION << 32
        head = (magic, os.getpid(), count, words[count % RING_STEPS], *[0] * (RING_WORD - 4))
        with self.beat.open("r+b") as file:
            file.write(struct.pack(f"<{RING_WORD + RING_STEPS}Q", *head, *words))

    def save(self, name: str, size_bytes: int = 1000) -> None:
        """Write a file that is a second old, so that the step of now comes after its last byte."""
        path = self.checkpoints / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size_bytes))
        before_ns = time.time_ns() - 1_000_000_000
        os.utime(path, ns=(before_ns, before_ns))

    async def scan(self) -> None:
        """Scan once, and wait for all hashing."""
        self.now_s += SCAN_S
        self.scanner.scan(self.ranks, self.now_s)
        await self.read()

    async def read(self) -> None:
        while self.scanner._reading:
            await asyncio.sleep(0.005)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.reports if isinstance(one, m.ManifestReported) and one.manifest]

    @property
    def doubts(self) -> list[str]:
        return [one.name for one in self.reports if isinstance(one, m.ManifestReported) and not one.manifest]


def _bench(folder: Path, **change: object) -> Bench:
    job = JobDir(folder)
    config = dataclasses.replace(CONFIG, root=str(folder), **change)  # type: ignore[arg-type]
    run = job.rank_run("n0", 1, 0)
    run.mkdir(parents=True, exist_ok=True)
    job.checkpoints.mkdir(exist_ok=True)
    job.attempt_logs(1).mkdir(parents=True, exist_ok=True)
    step_counter.create(run / "beat")
    index = LogIndex(job.rank_index(1, 0))
    process = RankProcess(0, 0, 1, run, job.rank_log(1, 0), index, step_counter.StepCounter(run / "beat"))
    reports: list[m.ReliableReport] = []
    notes: list[str] = []
    scanner = CheckpointScanner(config, Hasher(job.checkpoints), reports.append, notes.append)
    bench = Bench(scanner, NodeRanks(1, job, "n0", [process]), run / "beat", job.checkpoints, reports, notes)
    scanner.begin()
    return bench


def _play(folder: Path, act: Callable[[Bench], Awaitable[None]], **change: object) -> Bench:
    bench = _bench(folder, **change)

    async def main() -> None:
        await asyncio.wait_for(act(bench), 30.0)

    asyncio.run(main())
    return bench


def test_all_is_told_up_to_the_steps_of_the_look_before(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        await bench.scan()
        assert bench.scanner.reported_through_step == NOT_KNOWN
        bench.steps(5)
        await bench.scan()
        bench.save("five.pt")
        bench.steps(6)
        await bench.scan()
        assert (bench.names, bench.scanner.reported_through_step) == ([], NOT_KNOWN)
        bench.steps(9)
        await bench.scan()
        assert bench.names == ["five.pt"]
        assert bench.scanner.reported_through_step == 6
        await bench.scan()
        assert bench.scanner.reported_through_step == 9
        assert bench.names == ["five.pt"]

    _play(tmp_path, act)


def test_a_save_in_the_background_holds_the_claim_back(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        for count in range(1, 4):
            bench.steps(count)
            await bench.scan()
        assert bench.scanner.reported_through_step == 2
        for size in range(1, 5):
            bench.save("async/part.bin", size * 1000)
            bench.steps(3 + size)
            await bench.scan()
        assert bench.scanner.reported_through_step == 2
        bench.steps(9)
        await bench.scan()
        assert bench.names == ["async"]
        assert bench.scanner.reported_through_step == 7

    _play(tmp_path, act)


def test_what_never_becomes_a_checkpoint_holds_nothing_back_for_long(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.checkpoints.joinpath("torn.pt").write_bytes(b"PK\x03\x04 torn")
        bench.checkpoints.joinpath("renamed.pt").write_bytes(b"x")
        os.utime(bench.checkpoints / "torn.pt", (time.time() - 100, time.time() - 100))
        bench.steps(1)
        await bench.scan()
        bench.checkpoints.joinpath("renamed.pt").unlink()
        for count in range(2, 4):
            bench.steps(count)
            await bench.scan()
        assert bench.scanner.reported_through_step == 2

    _play(tmp_path, act)


def test_nothing_is_told_of_an_attempt_between_the_end_of_one_and_the_start_of_the_next(
    tmp_path: Path,
) -> None:
    async def act(bench: Bench) -> None:
        for count in range(1, 4):
            bench.steps(count)
            await bench.scan()
        assert bench.scanner.reported_through_step == 2
        assert bench.scanner.finish(bench.ranks, bench.now_s)
        assert bench.scanner.reported_through_step == NOT_KNOWN

    _play(tmp_path, act)


def test_what_is_still_being_read_does_not_count_as_told(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.steps(1)
        await bench.scan()
        bench.save("one.pt", 1 << 20)
        for count in range(2, 4):
            bench.steps(count)
            bench.now_s += SCAN_S
            bench.scanner.scan(bench.ranks, bench.now_s)
        assert (bench.names, bench.scanner.reported_through_step) == ([], NOT_KNOWN)
        await bench.read()
        assert (bench.names, bench.scanner.reported_through_step) == (["one.pt"], 2)

    _play(tmp_path, act)


def test_an_end_waits_until_the_last_checkpoint_is_told(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.steps(3)
        bench.ranks.processes[0].exit_code = 0
        bench.save("last.pt", 1 << 20)
        assert not bench.scanner.finish(bench.ranks, bench.now_s)
        assert bench.scanner.is_finishing
        await bench.read()
        assert bench.scanner.finish(bench.ranks, bench.now_s)
        assert bench.names == ["last.pt"]
        assert not bench.scanner.is_finishing

    _play(tmp_path, act)


def test_an_end_does_not_wait_for_ever(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.ranks.processes[0].exit_code = 0
        bench.save("last.pt", 64 << 20)
        assert not bench.scanner.finish(bench.ranks, bench.now_s)
        assert bench.scanner.finish(bench.ranks, bench.now_s + 1e6)
        await bench.read()
        assert bench.names == []

    _play(tmp_path, act)


def test_a_link_to_a_checkpoint_does_not_travel_beside_it(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.save("step-1.pt")
        (bench.checkpoints / "last.pt").symlink_to("step-1.pt")
        for count in range(1, 4):
            bench.steps(count)
            await bench.scan()
        assert bench.names == ["step-1.pt"]

    _play(tmp_path, act)


def test_a_checkpoint_of_too_many_files_for_one_message_is_named_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner_module, "MANIFEST_BYTES_MAX", 1000)

    async def act(bench: Bench) -> None:
        for part in range(20):
            bench.save(f"step-1/{part}.bin")
        for count in range(1, 4):
            bench.steps(count)
            await bench.scan()
        assert bench.names == []
        assert bench.notes == ["step-1 has 20 files, too many to fetch: it is not a checkpoint to start from"]
        assert bench.doubts == ["step-1"]
        assert bench.scanner.reported_through_step == 2

    _play(tmp_path, act)


def test_a_folder_that_a_dead_rank_was_writing_is_told_as_doubtful(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.save("step-1/0.bin")
        bench.save("step-9.pt")
        bench.ranks.processes[0].exit_code = -9
        assert bench.scanner.finish(bench.ranks, bench.now_s)
        assert (bench.names, bench.doubts) == ([], ["step-1"])

    _play(tmp_path, act, checkpoint_glob="step-*")


def test_where_nothing_travels_paths_are_told_and_nothing_is_claimed(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.save("one.pt")
        for count in range(1, 4):
            bench.steps(count)
            await bench.scan()
        told = [one.path for one in bench.reports if isinstance(one, m.CheckpointFound)]
        assert told == [str(bench.checkpoints / "one.pt")]
        assert len(bench.reports) == 1
        assert bench.scanner.reported_through_step == NOT_KNOWN

    _play(tmp_path, act, ships=False, finds_checkpoints=True)


def test_of_two_that_share_a_folder_one_looks_until_its_attempt_is_over(tmp_path: Path) -> None:
    other = _bench(tmp_path)

    async def act(bench: Bench) -> None:
        bench.steps(1)
        await bench.scan()
        assert (tmp_path / LOCK_FILE).exists()
        bench.save("one.pt")
        for count in range(2, 4):
            bench.steps(count)
            await bench.scan()
            await other.scan()
        assert (bench.names, other.names) == (["one.pt"], [])
        assert other.scanner.reported_through_step == 2  # the one that looks tells of all there is
        assert bench.scanner.finish(bench.ranks, bench.now_s)
        for _ in range(2):
            await other.scan()
        assert other.names == ["one.pt"]

    _play(tmp_path, act)


def test_what_an_agent_knew_to_be_whole_the_next_one_knows_too(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        for name in ("step-1.pkl", "step-2.pkl", "step-3.pkl"):
            bench.save(f"{name[:6]}/{name}")
            os.utime(bench.checkpoints / name[:6] / name, (1e9, 1e9 + int(name[5])))
        for count in range(1, 4):
            bench.steps(count)
            await bench.scan()
        bench.save("step-2/step-2.pkl", 500)
        bench.scanner._release()  # as the kernel does when it dies

    _play(tmp_path, act, ships=False, finds_checkpoints=True)
    later = _bench(tmp_path, ships=False, finds_checkpoints=True, checkpoint_keep=1)
    later.scanner.report_torn()
    assert later.reports == [m.CheckpointInvalidated(0, str(later.checkpoints / "step-2"))]

    async def go_on() -> None:
        later.save("step-4/step-4.pkl")
        later.times_ns = dict.fromkeys((1, 2), 15 * 10**17)
        for count in range(1, 4):
            later.steps(count)
            await later.scan()

    asyncio.run(go_on())
    assert sorted(path.name for path in later.checkpoints.iterdir()) == ["step-2", "step-4"]


def test_old_checkpoints_stay_a_while_where_they_have_to_travel(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        for number in range(5):
            bench.save(f"{number}.pt")
            os.utime(bench.checkpoints / f"{number}.pt", (1e9 + number, 1e9 + number))
            for _ in range(2):
                bench.steps(number + 1)
                await bench.scan()
            bench.times_ns[number + 1] = int(1e9 + number + 0.5) * 10**9
        assert bench.names == [f"{number}.pt" for number in range(5)]
        assert sorted(path.name for path in bench.checkpoints.iterdir()) == ["2.pt", "3.pt", "4.pt"]
        assert not [one for one in bench.reports if isinstance(one, m.CheckpointInvalidated)]

    _play(tmp_path, act, checkpoint_keep=1)
