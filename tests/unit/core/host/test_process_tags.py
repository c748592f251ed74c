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
def test_a_copy_of_a_folder_has_other_tags_and_a_moved_folder_the_same(tmp_path: Path, node: str) -> None:
    job = tmp_path / "jobs" / "gpt"
    job.mkdir(parents=True)
    shutil.copytree(tmp_path / "jobs", tmp_path / "copy")
    tag = process_tags.make_tag(job, node)
    assert tag != process_tags.make_tag(tmp_path / "copy" / "gpt", node)
    assert tag == process_tags.make_tag((tmp_path / "jobs").rename(tmp_path / "moved") / "gpt", node)


@pytest.mark.slow
def test_what_a_rank_leaves_is_its_jobs_with_and_without_a_tag_and_a_job_that_it_submitted_is_not(
    tmp_path: Path,
) -> None:
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
