"""A folder that ranks had made for a save when they were killed is out of the sight of scripts that take the newest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from orchestrator.core.checkpoints import disk
from tests.support.saved_files import write
from tests.unit.core.checkpoints.test_disk import FILES, root, save_of

__all__ = ["root"]  # a fixture


def test_later_folder_without_checkpoint_files_is_hidden(
    root: Path,
) -> None:
    """A later folder that has no file of a checkpoint is renamed out of sight."""
    save = save_of(root, "run/step_5", *FILES)
    for name in ("step_6", "step_7", "step_4", "eval_6", "step_8"):
        (root / "run" / name).mkdir()
    write(root / "run/step_7/config.json")
    write(root / "run/step_8/part.distcp")
    write(root / "run/step_9")
    for name in ("step_6", "step_7"):  # the file server's clock was set back
        os.utime(root / "run" / name, ns=(0, 10**8))
    (root / "run/step_10").symlink_to("step_5")
    assert disk.quarantine_unfinished(root, save, 2) == [
        ("run/step_6", ".step_6.torn-attempt-2"), ("run/step_7", ".step_7.torn-attempt-2"),
    ]  # fmt: skip
    left = sorted(path.name for path in (root / "run").iterdir())
    assert left == ["eval_6", "step_10", "step_4", "step_5", "step_8", "step_9"]
    assert (root / ".step_7.torn-attempt-2/config.json").exists()


def test_folder_beside_unnumbered_names_is_not_renamed(root: Path) -> None:
    """Beside files or a folder without a number no folder is renamed."""
    write(root / "model_5.pt")
    write(root / "latest/model.pt")
    for name in ("model_6.pt", "latest2"):
        (root / name).mkdir()
    assert disk.quarantine_unfinished(root, save_of(root, "model_5.pt", "model_5.pt"), 2) == []
    assert disk.quarantine_unfinished(root, save_of(root, "latest", "latest/model.pt"), 2) == []
    shutil.rmtree(root / "latest")
    assert disk.quarantine_unfinished(root, save_of(root, "gone/step_5"), 2) == []
