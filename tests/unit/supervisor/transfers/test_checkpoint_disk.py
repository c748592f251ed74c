"""Which torn saves are moved out of a script's sight: never one of a script's own place that may be whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.supervisor.transfers.checkpoint_disk import LocalCheckpointFolders, find_movable
from tests.unit.client.shelf import Shelf

TORN = CheckpointState.TORN


def test_torn_checkpoint_is_movable_only_if_certain(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    saves = [
        shelf.add(10, state=TORN, is_damaged=True),
        shelf.add_at_start(20, {"out/a_20.pt": b"x"}, state=TORN),
        shelf.add_at_start(30, {"out/a_30.pt": b"x"}, state=TORN, is_damaged=True),
        shelf.add_at_start(40, {"out/a_40.pt": b"x"}, state=TORN, is_damaged=True, attempt=2),
        shelf.add_at_start(50, {"out/a_50.pt": b"x"}, is_damaged=True),
    ]
    assert [save.step for save in find_movable(saves, 1, LocalCheckpointFolders(shelf.job, shelf.plan))] == [
        10,
        30,
    ]


def test_external_torn_checkpoint_is_moved_only_if_exclusive(
    tmp_path: Path,
) -> None:
    """A torn checkpoint outside the job is moved only if it is certainly this job's alone."""
    shelf, there = Shelf(tmp_path), tmp_path / "scratch"
    torn = {"state": TORN, "is_damaged": True, "root": there, "prefix": f"{there}/"}
    saves = [
        shelf.add(10, {"run/a_10.pt": b"x"}, **torn, is_new=True),
        shelf.add(20, {"run/a_20.pt": b"x"}, **torn, is_new=False),
    ]
    homes = LocalCheckpointFolders(shelf.job, shelf.plan)
    assert [save.step for save in find_movable(saves, 1, homes)] == [10]
    other = JobDir(shelf.job.root.with_name("other-20261128-100000000-ab"))
    shutil.copytree(shelf.job.root, other.root)
    other.ended.touch()
    assert [save.step for save in find_movable(saves, 1, homes)] == [10]
    other.ended.unlink()
    assert find_movable(saves, 1, homes) == []
