"""What the tests of checkpoints in memory share: the room that is free, and an agent's folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.agent.outputs import checkpoint_memory
from tests.support.memory_bench import ROOMY, MemoryBench, memory_bench


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is free, as a test wants it."""
    found = [ROOMY, ROOMY]
    monkeypatch.setattr(checkpoint_memory, "find_rooms", lambda folder: list(found))
    return found


@pytest.fixture
def bench(rooms: list[int], tmp_path: Path) -> Iterator[MemoryBench]:
    with memory_bench(tmp_path) as made:
        made.memory.open(None)
        yield made
