"""The scanner of an agent: saves are reported while the loop goes on, hashed afterwards, and by one agent of those that share
a disk."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.agent.outputs import checkpoint_scanner
from orchestrator.agent.outputs.checkpoint_scanner import (
    LAST_SCAN_S_MAX,
    LOCK_FILE,
    SCAN_SHARE_MAX,
    Hasher,
)
from orchestrator.core.checkpoints import tree
from orchestrator.core.checkpoints.checkpoint import CompletionReason, FileLocation
from orchestrator.core.errors import Cancelled
from orchestrator.core.host.procfs import IDLE_NICENESS
from orchestrator.core.wire import reports
from tests.support.save_bench import WAIT_S_MAX, Bench, bench, play
from tests.support.saved_files import saved, write


def test_checkpoint_is_reported_with_step_then_with_sha256(
    tmp_path: Path,
) -> None:
    """A checkpoint is reported with the steps made by then, and afterwards with its SHA-256."""

    async def act(bench: Bench) -> None:
        await bench.look()
        bench.step(5, 10.0)
        bench.save("step_5/a.pt", 11.0)
        bench.save("step_5/b.pt", 11.5)
        await bench.look(2)
        assert bench.reports == [] and bench.scanner.is_unfinished
        bench.step(6, 12.0)
        await bench.look(3)

    found = play(tmp_path, act)
    seen, hashed = found.reports
    assert isinstance(seen, reports.CheckpointSeen) and isinstance(hashed, reports.CheckpointHashed)
    assert (seen.attempt, seen.key, seen.series, seen.main) == (1, "step_5", "step_#", "step_5")
    part = seen.part
    assert (part.host, part.root, part.steps, part.closed_by) == (
        "node-0",
        str(found.root),
        5,
        CompletionReason.STEPS,
    )
    assert [piece.name for piece in part.files] == ["step_5/a.pt", "step_5/b.pt"] and part.reading.step == 5
    digests = [hashlib.sha256((found.root / piece.name).read_bytes()).hexdigest() for piece in part.files]
    wanted = tuple(dataclasses.replace(piece, sha256=one) for piece, one in zip(part.files, digests, strict=True))
    assert hashed == reports.CheckpointHashed(1, "step_5", wanted)
    assert (found.scanner.is_unfinished, found.scanner.scan_count) == (False, 6)


def test_old_files_are_ignored_but_slots_reported(
    tmp_path: Path,
) -> None:
    """Old files are not reported; an overwritten slot is reported each time."""
    write(tmp_path / "checkpoints/old.pt")

    async def act(bench: Bench) -> None:
        await bench.look()
        for count in range(2, 5):
            bench.save("ckpt.pt", 10.0 * count)
            bench.step(count, 10.0 * count + 5.0)
            await bench.look(2)

    assert play(tmp_path, act).mains == ["ckpt.pt"] * 3


def test_slow_scans_are_rarer(tmp_path: Path) -> None:

    async def act(bench: Bench) -> None:
        await bench.look()
        bench.scanner.scan(bench.ranks, bench.now_s + 1.0)
        while bench.scanner._scan_future is not None:
            bench.wake.clear()
            bench.scanner.scan(bench.ranks, bench.now_s + 11.0)  # it has taken 10 s
            if bench.scanner._scan_future is not None:
                await bench.wake.wait()
        for after_s, is_due in ((11.0 + 9.9 / SCAN_SHARE_MAX, False), (11.0 + 10.1 / SCAN_SHARE_MAX, True)):
            bench.scanner.scan(bench.ranks, bench.now_s + after_s)
            assert (bench.scanner._scan_future is not None) == is_due

    play(tmp_path, act)


def test_attempt_ends_after_last_scan_is_reported(tmp_path: Path) -> None:
    """An attempt is over once everything that its last scan found has been reported."""

    async def act(bench: Bench) -> None:
        await bench.look()
        bench.save("last.pt", 20.0)
        bench.ranks.processes[0].exit_code = 0
        await bench.finish()
        assert [(one.main, one.part.closed_by) for one in bench.seen] == [("last.pt", CompletionReason.END)]
        assert not bench.scanner.is_finishing and bench.scanner.scan_count == -1

    play(tmp_path, act)


def test_files_of_killed_rank_are_reported_as_unfinished(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        await bench.look()
        bench.save("step_5.pt", 20.0)
        (bench.root / "step_6.pt").write_bytes(b"PK\x03\x04")
        bench.ranks.processes[0].exit_code = -9
        await bench.finish()

    found = {one.main: (one.part.closed_by, bool(one.part.reading.faults)) for one in play(tmp_path, act).seen}
    assert found == {"step_5.pt": (CompletionReason.NONE, False), "step_6.pt": (CompletionReason.NONE, True)}


def test_agent_told_not_to_scan_does_not(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.save("step_5.pt", 20.0)
        bench.step(2, 30.0)
        await bench.look(2)
        await bench.finish()

    for found in (play(tmp_path / "a", act, finds_checkpoints=False), play(tmp_path / "b", act, looks=False)):
        assert found.reports == [] and found.scanner.scan_count == -1


@pytest.mark.parametrize("rank", [0, 1])
def test_external_shared_place_is_scanned_by_rank_0(tmp_path: Path, rank: int) -> None:
    """A shared place outside the job is scanned by the host of rank 0."""

    async def act(bench: Bench) -> None:
        bench.ranks.processes[0].rank = rank
        await bench.look()
        write(tmp_path / "data/step_5.pt", at_ns=bench.at(20.0))
        bench.step(2, 30.0)
        await bench.look(2)

    found = play(tmp_path / "job", act, ships=True, checkpoint_glob=f"{tmp_path}/data/*.pt")
    assert found.mains == (["step_5.pt"] if rank == 0 else [])


def test_hosts_without_shared_disk_scan_individually(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.ranks.processes[0].rank = 1
        await bench.look()
        bench.save("step_5.pt", 20.0)
        bench.step(2, 30.0)
        await bench.look(2)

    assert play(tmp_path, act, ships=True, finds_checkpoints=False).mains == ["step_5.pt"]


# Agents that share a disk, and agents that die


def test_one_agent_scans_and_another_continues_after_it(tmp_path: Path) -> None:
    """One of two agents scans; the other continues when the first one's ranks have ended."""

    async def act(first: Bench) -> None:
        other = bench(tmp_path, node="node-1")
        other.step(1, 1.0)
        await first.look()
        other.scanner.begin(1)
        first.save("step_5/a.pt", 20.0)
        first.step(2, 30.0)
        other.step(2, 30.0)
        await first.look(2)
        await other.look(2)
        assert (first.mains, other.mains, other.scanner.scan_count) == (["step_5/a.pt"[:6]], [], -1)
        await first.finish()
        other.save("step_5/b.pt", 40.0)
        other.save("step_6/a.pt", 40.0)
        other.step(3, 50.0)
        await other.look(3)
        assert other.mains == ["step_5", "step_6"] and other.scanner.scan_count == 3
        assert other.seen[0].part.stale == ()
        other.scanner.close()

    play(tmp_path, act)


def test_next_agent_reports_pending_finds_of_dead_one(tmp_path: Path) -> None:
    async def act(dead: Bench) -> None:
        write(dead.root / "old.pt", at_ns=dead.at(0.0))
        await dead.look()
        dead.save("step_5.pt", 20.0)
        dead.step(5, 30.0)
        await dead.look(2)
        dead.save("step_6.pt", 40.0)
        os.close(dead.scanner._lock_fd)  # type: ignore[arg-type] # as the kernel does
        later = bench(tmp_path)
        await later.scanner.recover()
        assert [(one.attempt, one.main, one.part.closed_by) for one in later.seen] == [
            (1, "step_6.pt", CompletionReason.NONE)
        ]
        assert later.scanner.scan_count == -1
        later.scanner.begin(2)
        await later.look(2)
        assert len(later.seen) == 1, "they are of the attempt before"
        later.scanner.close()

    play(tmp_path, act)


@pytest.mark.parametrize("left", [b"", b"{", b"[]", b"null", b'{"attempt": 1}', b"\xff" * 100, b"[" * 100_000])
def test_next_agent_starts_despite_any_leftover_lock(tmp_path: Path, left: bytes) -> None:
    """The next agent starts, whatever a dead one has left in the lock file."""
    (tmp_path / LOCK_FILE).write_bytes(left)

    async def act(bench: Bench) -> None:
        bench.scanner._release()
        (tmp_path / LOCK_FILE).write_bytes(left)
        await bench.scanner.recover()
        bench.scanner.begin(1)
        await bench.look()
        bench.save("step_5.pt", 20.0)
        bench.step(2, 30.0)
        await bench.look(2)

    assert play(tmp_path, act).mains == ["step_5.pt"]


# Limits


def test_checkpoint_too_large_for_message_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that does not fit into a message is named and skipped."""
    monkeypatch.setattr(checkpoint_scanner, "LINE_BYTES_MAX", 3_000)

    async def act(bench: Bench) -> None:
        await bench.look()
        for part in range(20):
            bench.save(f"step_5/{part}.pt", 20.0)
        bench.save("step_6.pt", 21.0)
        bench.step(2, 30.0)
        await bench.look(4)

    found = play(tmp_path, act)
    assert found.mains == ["step_6.pt"] and not found.scanner.is_unfinished
    assert found.notes == ["step_5 has 20 files, too many to report: no restart can resume from it"]


def test_incomplete_scan_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that does not see everything is noted once."""
    monkeypatch.setattr(tree, "ENTRIES_MAX", 10)

    async def act(bench: Bench) -> None:
        for number in range(20):
            bench.save(f"samples/{number}.png", 20.0)
        await bench.look(4)

    assert play(tmp_path, act).notes == [f"not all checkpoints are seen: {tmp_path}/checkpoints: more than 10 entries"]


def test_hanging_disk_delays_neither_loop_nor_end_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, scandir = threading.Event(), os.scandir

    def slow(path: Path) -> object:
        answers.wait(WAIT_S_MAX)
        return scandir(path)

    async def act(bench: Bench) -> None:
        bench.scanner.scan(bench.ranks, bench.now_s)
        bench.save("step_5.pt", 20.0)
        assert bench.reports == [] and bench.scanner.scan_count == 0
        assert not bench.scanner.finish(bench.ranks, bench.now_s)
        assert not bench.scanner.finish(bench.ranks, bench.now_s + LAST_SCAN_S_MAX - 1.0)
        assert bench.scanner.finish(bench.ranks, bench.now_s + LAST_SCAN_S_MAX)
        assert bench.notes == ["the disk of the checkpoints did not answer for 600 s"]
        answers.set()

    monkeypatch.setattr(os, "scandir", slow)
    play(tmp_path, act)


def test_discarded_checkpoint_is_deleted_in_thread(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.save("step_5.pt", 20.0)
        about = (bench.root / "step_5.pt").stat()
        await bench.look()
        piece = tree.scan(bench.root).files["step_5.pt"]
        assert piece.size_bytes == about.st_size
        bench.scanner.discard(
            saved(1, main="step_5.pt", files=(piece,), locations=(FileLocation("n", str(bench.root)),))
        )
        await bench.look()
        assert not (bench.root / "step_5.pt").exists()

    play(tmp_path, act)


# Hashing


def test_hashing_is_paced_hurried_and_cancelled_on_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hashing is paced, hurried at the end and given up when the agent exits."""
    monkeypatch.setattr(checkpoint_scanner, "HASH_BYTES_PER_S", 1.0)
    hasher = Hasher()

    def read(pace: Callable[[int], None]) -> None:
        began.set()
        for _ in range(1000):
            pace(1_000_000)

    hasher.is_unthrottled = True
    began = threading.Event()
    hasher.run(read).result(WAIT_S_MAX)
    hasher.is_unthrottled = False
    began.clear()
    slow, waiting = hasher.run(read), hasher.run(read)
    assert began.wait(WAIT_S_MAX)
    hasher.close()
    with pytest.raises(Cancelled):
        slow.result(WAIT_S_MAX)
    with pytest.raises((Cancelled, concurrent.futures.CancelledError)):
        waiting.result(WAIT_S_MAX)


def test_only_hashing_thread_has_low_priority() -> None:
    def niceness(_: object = None) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own, hasher = niceness(), Hasher()
    assert hasher.run(niceness).result(WAIT_S_MAX) == IDLE_NICENESS
    assert niceness() == own
    hasher.close()


def test_file_rewritten_while_hashed_has_no_digest(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        await bench.look()
        bench.save("step_5.pt", 20.0)
        bench.step(2, 30.0)
        gate = threading.Event()
        bench.scanner._hasher.run(lambda _: gate.wait(WAIT_S_MAX))
        for count in range(3, 5):
            bench.now_s += 1000.0
            bench.step(count, 30.0)
            while bench.scanner.scans_done < 3 and not bench.reports:
                bench.wake.clear()
                bench.scanner.scan(bench.ranks, bench.now_s)
                if bench.reports or not bench.is_busy:
                    break
                await bench.wake.wait()
        bench.save("step_5.pt", 40.0)
        gate.set()
        await bench.hash()
        assert bench.mains == ["step_5.pt"] and len(bench.reports) == 1

    play(tmp_path, act)


@pytest.mark.slow
def test_twenty_thousand_small_files_do_not_block_loop(tmp_path: Path) -> None:
    for folder in range(20):
        (tmp_path / f"checkpoints/samples/{folder}").mkdir(parents=True)
        for number in range(1000):
            (tmp_path / f"checkpoints/samples/{folder}/{number}.png").touch()

    async def act(bench: Bench) -> None:
        gaps_s: list[float] = []

        async def beat() -> None:
            while True:
                before_s = time.monotonic()
                await asyncio.sleep(0.05)
                gaps_s.append(time.monotonic() - before_s)

        beating = asyncio.create_task(beat())
        await bench.look()
        bench.save("run/step_5.pt", 20.0)
        bench.step(2, 30.0)
        await bench.look(2)
        beating.cancel()
        assert bench.mains == ["run/step_5.pt"] and len(gaps_s) > 10
        assert max(gaps_s) < sum(gaps_s) / 4, f"{max(gaps_s):.2f} s of {sum(gaps_s):.2f} s"

    play(tmp_path, act)
