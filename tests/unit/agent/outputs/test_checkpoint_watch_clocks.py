"""Whatever a file server's clock shows, and when it jumps: the same saves are reported, with the same reason, as by a right one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch, ScanContext
from orchestrator.core.checkpoints.checkpoint import CompletionReason
from tests.support.file_layouts import Layout
from tests.support.layouts import LAYOUTS
from tests.support.saved_files import MS, SAVED_NS, S, write, write_all

HOUR_S = 3600.0
CLOCKS = {
    "an hour behind": (-HOUR_S, -HOUR_S),
    "2 s behind": (-2.0, -2.0),
    "0.2 s behind": (-0.2, -0.2),
    "0.2 s ahead": (0.2, 0.2),
    "2 s ahead": (2.0, 2.0),
    "an hour ahead": (HOUR_S, HOUR_S),
    "set back in the midst of saves": (0.0, -HOUR_S),
    "set forward in the midst of saves": (0.0, HOUR_S),
}

Told = list[tuple[str, CompletionReason, tuple[str, ...], int]]


def story(root: Path, layout: Layout, begins_s: float = 0.0, goes_on_s: float = 0.0) -> Told:
    """Write the saves of a layout, each in two halves with looks and no step between them, the last of them only in part if it
    has several files, by a clock that is off by so much in the first half of each save and in the second; return what is reported."""
    told, steps, now_s = Told(), 1, itertools.count(1000.0)
    write_all(root, layout.others, SAVED_NS)
    watch = CheckpointWatch(root, "*")
    watch.begin(1)

    def look(*, ended: bool = False) -> None:
        for change in watch.scan(ScanContext(next(now_s), lambda: {0: steps}, ended)):
            told.append((change.group.main, change.closed_by, change.reading.faults, len(change.pieces)))

    look()
    for number, save in enumerate(layout.saves, 1):
        true_ns, names = SAVED_NS + number * 10 * S, list(save.files)
        half, is_last = -(-len(names) // 2), number == len(layout.saves)
        for index, name in enumerate(names[:half] if is_last else names):
            late_s = begins_s if index < half else goes_on_s
            write(root / name, save.files[name], true_ns + int(late_s * S) + index * MS)
            if index == half - 1:
                look()
                look()
        for _ in range(0 if is_last else 3):
            steps += 1
            look()
    look(ended=True)
    return told


@pytest.mark.parametrize("clock", CLOCKS.values(), ids=list(CLOCKS))
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_same_checkpoints_are_reported_under_any_clock(
    tmp_path: Path, layout: Layout, clock: tuple[float, float]
) -> None:
    """The same checkpoints are reported, whatever the clock of the file server is."""
    right = story(tmp_path / "right", layout)
    assert right and story(tmp_path / "other", layout, *clock) == right
