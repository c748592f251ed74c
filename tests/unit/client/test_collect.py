"""Is everything that a job left listed, copied and cleared away, and nothing else?"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import time
import zipfile
from pathlib import Path

import pytest

from orchestrator.agent import keeper
from orchestrator.brain.model import events as e
from orchestrator.client import cleanup, collect
from orchestrator.client.job import Job
from orchestrator.core import codec
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.layout import JobDir
from tests.support import folders, jobs
from tests.support.unprivileged import unprivileged


def _with_checkpoints(tmp_path: Path) -> JobDir:
    """Make a job that has two known checkpoints, and a later one that was cut off."""
    known = [*jobs.submitted(), *jobs.running(1, 1.0, 20)]
    draft = folders.make(tmp_path / "draft", known)
    paths = [draft.checkpoints / f"step-{step}.pt" for step in (10, 20)]
    found = [e.CheckpointFound(5.0 + n, "node-0", 1, str(path), 10 * (n + 1)) for n, path in enumerate(paths)]
    told = folders.make(tmp_path / "told", [*known, *found])
    told.journal.replace(draft.journal)
    for number, path in enumerate([*paths, draft.checkpoints / "step-30.pt"]):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data", "x" * 1000)
        os.utime(path, (1e9 + number, 1e9 + number))
    torn = draft.checkpoints / "step-30.pt"
    torn.write_bytes(torn.read_bytes()[:500])
    os.utime(torn, (1e9 + 2, 1e9 + 2))
    return draft


def test_checkpoints_are_listed_oldest_first_with_what_is_known_of_each(tmp_path: Path) -> None:
    listed = collect.checkpoints(Job(_with_checkpoints(tmp_path)), verify=True)
    rows = [
        (Path(one["path"]).name, one["step"], one["complete"], one["whole"], one["resume"]) for one in listed
    ]
    assert rows == [
        ("step-10.pt", 10, True, True, False), ("step-20.pt", 20, True, True, True),
        ("step-30.pt", None, False, False, False),
    ]  # fmt: skip
    assert listed[0]["written_at"] == "2001-09-09T01:46:40.000Z" and listed[0]["bytes"] > 1000


def test_without_verify_no_file_is_opened(tmp_path: Path) -> None:
    listed = collect.checkpoints(Job(_with_checkpoints(tmp_path)), verify=False)
    assert [one["whole"] for one in listed] == [None, None, None]


def test_collect_copies_logs_checkpoints_and_the_post_mortem_but_no_secrets(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    (job.checkpoints / "step-5.pt").write_text("x")
    to = collect.collect(Job(job), tmp_path / "to" / "new")
    names = sorted(str(path.relative_to(to)) for path in to.rglob("*") if path.is_file())
    assert names == [
        "checkpoints/step-5.pt", "job.yaml", "journal.jsonl", "logs/attempt-001/rank-00000.log",
        "logs/attempt-001/rank-00001.log", "why.json",
    ]  # fmt: skip
    assert json.loads((to / "why.json").read_text())["attempts"][0]["verdict"]["kind"] == "crash"


def test_checkpoints_that_are_saved_elsewhere_are_copied_too(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    place = dataclasses.replace(Job(job).plan(), checkpoint_glob="{job_dir}/code/out/*")
    job.plan.write_text(codec.dumps(place))
    for name in ("out/s.pt", "out/step-1/a.pt", "train.py"):
        (job.code / name).parent.mkdir(parents=True, exist_ok=True)
        (job.code / name).write_text("x")
    to = collect.collect(Job(job), tmp_path / "to")
    assert sorted(str(path.relative_to(to)) for path in to.glob("checkpoints/**/*.pt")) == [
        "checkpoints/out/s.pt", "checkpoints/out/step-1/a.pt",
    ]  # fmt: skip


def test_a_file_that_vanishes_while_a_running_job_is_copied_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = folders.failed(tmp_path)
    for number in (1, 2):
        (job.checkpoints / f"step-{number}.pt").write_text("x")
    copy = shutil.copyfile

    def copy_and_prune(source: str, target: str, **more: bool) -> str:
        (job.checkpoints / "step-2.pt").unlink(missing_ok=True)
        return copy(source, target, **more)

    monkeypatch.setattr(shutil, "copyfile", copy_and_prune)
    to = collect.collect(Job(job), tmp_path / "to")
    assert [path.name for path in (to / "checkpoints").iterdir()] == ["step-1.pt"]


def test_what_is_collected_lends_nobodys_rights_and_others_cannot_write_to_it(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    job.rank_log(1, 1).chmod(0o6777)
    job.attempt_logs(1).chmod(0o777)
    job.spec.chmod(0o600)
    collect.collect(Job(job), tmp_path / "to")
    folder = tmp_path / "to" / "logs" / "attempt-001"
    modes = [
        path.stat().st_mode & 0o7777
        for path in (folder, folder / "rank-00001.log", tmp_path / "to" / "job.yaml")
    ]
    assert modes == [0o755, 0o755, 0o600]
    assert (folder / "rank-00001.log").stat().st_mtime == job.rank_log(1, 1).stat().st_mtime


def test_collect_without_a_folder_says_where_everything_is(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    assert collect.collect(Job(job), None) == job.root


@pytest.mark.parametrize("to", ["full", "file", "inside", "circle", "x" * 5000])
def test_a_folder_that_is_unfit_is_refused(tmp_path: Path, to: str) -> None:
    job = folders.failed(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    (tmp_path / "file").touch()
    place = job.logs / "copy" if to == "inside" else tmp_path / to
    with pytest.raises(UserError) as told:
        collect.collect(Job(job), place)
    assert told.value.fix and not (job.logs / "copy").exists()


def test_a_copy_that_fails_is_the_clusters_fault(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be copied"):
        collect.collect(Job(folders.failed(tmp_path)), Path("/proc/no/such"))


@pytest.mark.parametrize("to", ["there", "new/one"])
def test_a_copy_that_fails_half_way_leaves_nothing(tmp_path: Path, to: str) -> None:
    job = folders.failed(tmp_path / "home")
    os.mkfifo(job.checkpoints / "pipe")
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ClusterError, match=r"cannot be copied: .*pipe.* is a named pipe"):
        collect.collect(Job(job), tmp_path / to)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_copy_whose_folder_cannot_be_made_leaves_none_of_those_around_it(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="too long"):
        collect.collect(Job(folders.failed(tmp_path)), tmp_path / "new" / ("x" * 300))
    assert not (tmp_path / "new").exists()


def test_tidy_clears_run_files_of_ended_jobs_and_old_drafts_only(tmp_path: Path) -> None:
    ended = folders.failed(tmp_path)
    running = folders.make(tmp_path, [*jobs.submitted(), *jobs.running(1, 1.0, 7)])
    for job in (ended, running):
        (job.root / "nodes" / "node-0").mkdir(parents=True)
    old, new = tmp_path / "jobs/.old-draft", tmp_path / "jobs/.new-draft"
    for draft in (old, new):
        draft.mkdir()
    os.utime(old, (1e9, 1e9))
    said = cleanup.clean_local([Job(ended), Job(running)])
    assert said == ("cleaned up 1 ended job, removed 1 cut off submit", {})
    assert not (ended.root / "nodes").exists() and (running.root / "nodes").exists()
    assert not old.exists() and new.exists() and ended.rank_log(1, 1).exists()


def test_tidy_says_what_is_left_and_why(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    with unprivileged(tmp_path):
        job.root.chmod(0o555)
        said, left = cleanup.clean_local([Job(job)])
        deleted, undeleted = cleanup.delete([Job(job)])
        job.root.chmod(0o755)
    assert (said, deleted) == ("", "")
    assert (
        left[job.id]
        .lines()[0]
        .startswith(f"this machine: clean: cannot be deleted: {job.root / 'nodes'}: Perm")
    )
    assert list(undeleted) == [job.id] and "\n  fix: " in undeleted[job.id].lines()[0]


def test_a_process_that_cannot_be_ended_keeps_its_run_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = folders.failed(tmp_path)
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    monkeypatch.setattr(keeper, "clean_up_processes", lambda job, node: [4711])
    said, left = cleanup.clean_local([Job(job)])
    assert said == "" and "process 4711" in left[job.id].lines()[0]
    assert (job.root / "nodes" / "node-0").exists()


@pytest.mark.slow
def test_a_cleanup_ends_what_the_job_left_and_nothing_else_that_it_has_started(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    left = {**os.environ, keeper.TAG: f"{job.id}/node-0"}
    with (
        subprocess.Popen(["sleep", "60"]) as other,  # such as the supervisor of another job, revived just now
        subprocess.Popen(["sleep", "60"], env=left) as its_own,
    ):
        said, _ = cleanup.clean_local([Job(job)])
        ended = its_own.wait(10.0), other.poll()
        other.kill()
    assert said.startswith("cleaned up 1 ended job") and ended == (-9, None)


def test_tidy_does_not_need_a_plan(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    job.plan.write_text("{")
    assert cleanup.clean_local([Job(job)])[0].startswith("cleaned up 1 ended job")


def test_a_job_that_could_be_deleted_only_in_part_can_be_deleted_later(tmp_path: Path) -> None:
    job = _with_checkpoints(tmp_path)
    job.ended.touch()
    with unprivileged(tmp_path):
        job.checkpoints.chmod(0o555)
        assert cleanup.delete([Job(job)])[0] == ""
        job.checkpoints.chmod(0o755)
    assert job.plan.exists() and job.ended.exists() and list(job.checkpoints.iterdir())
    assert cleanup.delete([Job(job)])[1] == {} and not job.root.exists()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_job_that_is_resumed_while_clean_asks_is_not_deleted(tmp_path: Path, when: str) -> None:
    job = folders.failed(tmp_path)
    with locks.resuming(job) if when == "meanwhile" else contextlib.nullcontext():
        if when == "before":
            job.ended.unlink()
        before = sorted(job.root.iterdir())
        said, left = cleanup.delete([Job(job)])
    assert said == "" and "was resumed, so it is not over" in left[job.id].lines()[0]
    assert set(before) <= set(job.root.iterdir())


def test_only_jobs_that_ended_long_enough_ago_are_deleted(tmp_path: Path) -> None:
    old, new = folders.failed(tmp_path, "old"), folders.failed(tmp_path, "new")
    running = folders.make(tmp_path, jobs.submitted(), "running")
    os.utime(old.ended, (time.time() - 7200,) * 2)
    chosen = cleanup.older_than([Job(old), Job(new), Job(running)], 3600.0)
    assert [job.id for job in chosen] == [old.id]
    assert cleanup.delete(chosen) == ("deleted 1 job (old)", {})
    assert not old.root.exists() and new.root.exists()
