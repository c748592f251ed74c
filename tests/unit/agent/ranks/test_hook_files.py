"""Which files the hook takes for ones of a checkpoint, by their names and folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.agent.ranks.hook import errors, files
from orchestrator.agent.ranks.hook.errors import HookNotes
from orchestrator.agent.ranks.hook.files import ENDINGS, may_be_checkpoint
from orchestrator.agent.ranks.hook.layout import FILES_FILE
from orchestrator.core.checkpoints import file_groups
from tests.support.saved_files import write


def test_hook_knows_every_checkpoint_suffix() -> None:
    assert {suffix.removeprefix(".") for suffix in file_groups.SUFFIXES} <= ENDINGS


@pytest.mark.parametrize(
    ("name", "may_be"),
    [
        ("a.pt", True), ("/x/A.PT", True), ("out/ckpt_0.50", True), ("checkpoint-500", True), ("snapshot", True), (".metadata", True),
        ("train.py", False), ("epoch.json", False), ("loss.csv", False), ("README", False), ("step_5/log.txt", False),
    ],
)  # fmt: skip
def test_file_is_noted_by_suffix_or_name(name: str, may_be: bool) -> None:
    assert may_be_checkpoint(name) == may_be


def test_only_own_folder_in_memory_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is below /dev is no checkpoint."""
    monkeypatch.setattr(sys, "addaudithook", lambda _: None)
    notes = list[list[str]]()
    for folder in ("/dev/shm/orch-j-node-0/checkpoints", f"{tmp_path}/checkpoints", ""):
        monkeypatch.setenv("ORCH_CHECKPOINT_DIR", folder)
        run = tmp_path / f"run-{len(notes)}"
        run.mkdir()
        watch = files.FileWatch(str(run), cast(HookNotes, None), lambda: 3)
        for name in ("/dev/shm/orch-j-node-0/checkpoints/a.pt", "/dev/shm/b.pt", f"{run}/c.pt", f"{tmp_path}/d.pt"):
            watch.note_opening(name, os.O_WRONLY)
        notes.append([line.rpartition("/")[2][:1] for line in (run / FILES_FILE).read_text().splitlines()[1:]])
    assert notes == [["a", "d"], ["d"], ["d"]]


def test_file_that_fails_to_load_is_named_behind_link_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, memory = write(tmp_path / "job/checkpoints/step-5/a.pt"), tmp_path / "memory/step-5"
    memory.mkdir(parents=True)
    (memory / "a.pt").symlink_to(path)
    monkeypatch.setenv("ORCH_RESUME_FROM", str(memory))
    monkeypatch.setenv("ORCH_CHECKPOINT_DIR", str(memory.parent))
    monkeypatch.setenv("ORCH_RANK_DIR", f"{tmp_path}/job/nodes/node-0/attempt-001/rank-00000")
    scope: dict[str, Any] = {"__name__": "torch.serialization"}
    exec("def load(path): raise RuntimeError('damaged')", scope)
    with pytest.raises(RuntimeError) as told:
        scope["load"](str(memory / "a.pt"))
    assert errors.find_loading_file(told.value) == str(path)
