"""Are the processes of a job told from those of its copies, and of jobs that its ranks have submitted?"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.core.host import process_tags, procfs


@pytest.mark.parametrize("node", ["node-0", ""])
def test_copied_folder_has_other_tags(tmp_path: Path, node: str) -> None:
    """A copy of a folder has other tags, and a moved folder has the same."""
    job = tmp_path / "jobs" / "gpt"
    job.mkdir(parents=True)
    shutil.copytree(tmp_path / "jobs", tmp_path / "copy")
    tag = process_tags.make_tag(job, node)
    assert tag != process_tags.make_tag(tmp_path / "copy" / "gpt", node)
    assert tag == process_tags.make_tag((tmp_path / "jobs").rename(tmp_path / "moved") / "gpt", node)


@pytest.mark.slow
def test_leftover_process_belongs_to_its_job(
    tmp_path: Path,
) -> None:
    """A rank's leftover process belongs to its job with or without a tag; a job that it submitted does not."""
    tag, other = process_tags.make_tag(tmp_path, "node-0"), "eval/@1:2"
    stray, cleared = f"{process_tags.NAME}={tag}", "A=1"
    text = "".join(f"env -i {env} sleep 60 & " for env in (stray, cleared))
    text += f"env -i {process_tags.NAME}={other} sh -c 'env -i sleep 60 & wait' & wait"
    with subprocess.Popen(["/bin/sh", "-c", text], env={**os.environ, process_tags.NAME: tag}) as rank:
        while len(everything := procfs.descendants(rank.pid)) < 4:
            time.sleep(0.01)
        while any(procfs.environment(pid, "PATH") for pid in everything[:3]):  # not yet what it is to be
            time.sleep(0.01)
        own = process_tags.descendants(rank.pid, tag)
        for pid in (*everything, rank.pid):
            os.kill(pid, 9)
    assert own == everything[:2]
