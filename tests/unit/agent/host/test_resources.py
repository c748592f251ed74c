"""Resources of a node, as the kernel tells them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.agent.host import resources
from orchestrator.core.host import procfs


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ext4", False), ("", True)])
def test_folder_on_a_disk_is_told_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: bool
) -> None:
    """What the kernel does not list counts as memory: nothing is said about it."""
    device = tmp_path.stat().st_dev
    line = f"31 29 {os.major(device)}:{os.minor(device)} / /mnt rw shared:1 - {kind} none rw\n"
    monkeypatch.setattr(procfs, "read_text", lambda path: line if kind else "")
    assert resources.inspect_folder(str(tmp_path / "not-yet")).may_be_memory is expected
