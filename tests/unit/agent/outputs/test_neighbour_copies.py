"""Copies that an agent keeps for its neighbours: which stay, and what it stores of them."""

from __future__ import annotations

from pathlib import Path

from orchestrator.core.checkpoints.checkpoint import CopyTarget, FileLocation
from orchestrator.core.wire import orders
from tests.support.memory_bench import MemoryBench, memory_bench, pieces

NEIGHBOUR = CopyTarget.NEIGHBOUR


def _keep(bench: MemoryBench, number: int, safe: int = 0) -> tuple[int, ...]:
    """Let an agent keep files for another node, here from its own folder; return the numbers that it does not keep any more."""
    name = f"step-{number}.pt"
    bench.save(name)
    source = FileLocation("", str(bench.memory.folder), (name,))
    files = pieces(bench.memory.folder, name)
    bench.memory.copy(orders.CopyCheckpoint(number, files, NEIGHBOUR, (source,), safe=safe))
    return bench.next_report().dropped


def test_copies_of_a_safe_checkpoint_stay_beside_the_newest(tmp_path: Path) -> None:
    with memory_bench(tmp_path) as bench:
        assert [_keep(bench, 1), _keep(bench, 2, safe=1), _keep(bench, 3, safe=1), _keep(bench, 4, safe=3)] == [
            (), (), (), (1, 2),
        ]  # fmt: skip


def test_agent_that_keeps_copies_does_not_say_that_its_memory_is_empty(tmp_path: Path) -> None:
    """A spare never opens its memory for ranks, and its line may break."""
    with memory_bench(tmp_path) as bench:
        assert bench.memory.is_empty
        _keep(bench, 1)
        assert not bench.memory.is_empty


def test_copies_for_a_neighbour_are_stored_from_where_they_are(tmp_path: Path) -> None:
    with memory_bench(tmp_path) as bench:
        _keep(bench, 1)
        root = bench.memory.folder.parent / "neighbours" / "1"
        files = pieces(root, "step-1.pt")
        (bench.memory.folder / "step-1.pt").unlink()
        copied = bench.copy(1, files, CopyTarget.DISK, bench.location("step-1.pt", root=root))
        assert (copied.error, copied.names) == ("", ("step-1.pt",))
        assert (bench.disk / "step-1.pt").read_bytes() == b"data"
