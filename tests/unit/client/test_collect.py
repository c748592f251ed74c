"""What a job left: copied to one place, brought from its hosts, cleared away; and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.agent.process import keeper
from orchestrator.client import cleanup, collect, saves
from orchestrator.client.collect import HostFile
from orchestrator.client.job import Job
from orchestrator.core.checkpoints.save import Save, SaveState
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.host import process_tags
from orchestrator.core.jobdir import home, locks
from tests.support import folders, jobs
from tests.support.saved_files import write
from tests.support.unprivileged import unprivileged
from tests.unit.client.shelf import S, Shelf, state


def test_collect_copies_logs_checkpoints_and_the_post_mortem_but_no_secrets(
    tmp_path: Path,
) -> None:
    job = folders.failed(tmp_path)
    (job.checkpoints / "step-5.pt").write_text("x")
    for name in (
        "lightning_logs/version_0/events.out.tfevents.7.node",
        "wandb/offline-run-7/files/a",
        "wandb/offline-run-7/run-7.wandb",
    ):
        write(job.code / name, b"x", int(jobs.BEGAN_S + 60) * 10**9)
    write(job.code / "old/events.out.tfevents.1.node", b"x", 10**9)
    (job.root / "tensorboard").symlink_to(job.code / "wandb")
    runs = Job(job).status()["trackers"]
    assert [(run["kind"], run["path"].removeprefix(f"{job.code}/")) for run in runs] == [
        ("tensorboard", "lightning_logs/version_0"), ("wandb", "wandb/offline-run-7"),
    ]  # fmt: skip
    to = collect.collect(Job(job), tmp_path / "to" / "new")
    names = sorted(str(path.relative_to(to)) for path in to.rglob("*") if path.is_file())
    assert names == [
        "checkpoints/step-5.pt", "code/lightning_logs/version_0/events.out.tfevents.7.node",
        "code/wandb/offline-run-7/files/a", "code/wandb/offline-run-7/run-7.wandb", "job.yaml", "journal.jsonl", "logs/attempt-001/rank-00000.log",
        "logs/attempt-001/rank-00001.log", "why.json",
    ]  # fmt: skip
    assert json.loads((to / "why.json").read_text())["attempts"][0]["verdict"]["kind"] == "crash"


def _collected(shelf: Shelf, tmp_path: Path) -> list[str]:
    """Return what is copied of a job's checkpoints."""
    to = collect.collect(Job(shelf.job), tmp_path / "to")
    return sorted(str(path.relative_to(to)) for path in to.glob("checkpoints/**/*") if path.is_file())


def test_saves_in_the_working_folder_are_copied_too_and_nothing_else_of_it(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.add(10, {"out/s.pt": state(10)}, root=shelf.job.code)
    shelf.add(
        20, {"out/step-1/a.pt": state(20)}, root=shelf.job.code, state=SaveState.DISTRUSTED, main="out/step-1"
    )
    assert _collected(shelf, tmp_path) == [
        "checkpoints/ledger.jsonl",
        "checkpoints/out/s.pt",
        "checkpoints/out/step-1/a.pt",
    ]


def test_a_save_that_is_whole_only_as_orch_has_kept_it_is_copied_so(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    (shelf.folder / ".coming" / "7").mkdir(parents=True)
    last = shelf.add(10, {"last.pt": state(10)})
    shelf.keep(last)
    copied = _collected(shelf, tmp_path / "whole")
    assert copied == ["checkpoints/last.pt", "checkpoints/ledger.jsonl"], "it need not be copied twice"
    (shelf.folder / "last.pt").write_bytes(b"half of the next one")
    copied = _collected(shelf, tmp_path / "torn")
    assert copied == ["checkpoints/.kept/1/last.pt", "checkpoints/last.pt", "checkpoints/ledger.jsonl"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_vanishes_while_a_running_job_is_copied_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A script that keeps its newest saves deletes a file and a folder, before or after a file of each was copied."""
    job = folders.failed(tmp_path)
    for number in (1, 2, 3):
        (job.checkpoints / f"step-{number}.pt").write_text("x")
    (job.checkpoints / "step-4").mkdir()
    copy = shutil.copyfile

    def prune() -> None:
        (job.checkpoints / "step-4").rmdir()
        (job.checkpoints / "step-2.pt").unlink()
        (job.checkpoints / "step-3.pt").unlink()

    def copy_and_prune(source: str, target: str, **more: bool) -> str:
        is_there = (job.checkpoints / "step-2.pt").exists() and source.endswith(".pt")
        if is_there and (when == "before" or not source.endswith("step-1.pt")):
            copied = copy(source, target, **more) if when == "after" else ""
            prune()
            return copied or copy(source, target, **more)
        return copy(source, target, **more)

    monkeypatch.setattr(shutil, "copyfile", copy_and_prune)
    to = collect.collect(Job(job), tmp_path / "to")
    assert (to / "checkpoints/step-1.pt").read_text() == "x"


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
    old, new = (tmp_path / "jobs" / f".{home.new_id('gpt', at_s)}" for at_s in (1e9, 1e9 + 1))
    own = tmp_path / "jobs/.archive"  # which a person keeps there
    for folder in (old, new, own):
        folder.mkdir()
    for folder in (old, own):
        os.utime(folder, (1e9, 1e9))
    said = cleanup.clean_local([Job(ended), Job(running)])
    assert said == (f"cleaned up 1 ended job ({ended.id}), removed 1 cut off submit ({old.name})", {})
    assert not (ended.root / "nodes").exists() and (running.root / "nodes").exists()
    assert not old.exists() and new.exists() and own.exists() and ended.rank_log(1, 1).exists()


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
    monkeypatch.setattr(keeper, "clean_up_processes", lambda tag: [4711])
    said, left = cleanup.clean_local([Job(job)])
    assert said == "" and "process 4711" in left[job.id].lines()[0]
    assert (job.root / "nodes" / "node-0").exists()


@pytest.mark.slow
def test_a_cleanup_ends_what_the_job_left_and_nothing_else_that_it_has_started(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    left = {**os.environ, process_tags.NAME: process_tags.of(job.root, "node-0")}
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
    job = Shelf(tmp_path).job
    (job.checkpoints / "step-1.pt").touch()
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


# What hosts still have


def _there(save: Save, **fields: int) -> HostFile:
    """Return the file of a save as a host has it."""
    piece = save.pieces[0]
    about = {"size_bytes": piece.size_bytes, "mtime_s": piece.mtime_ns // S, **fields}
    return HostFile(f"checkpoints/{piece.name}", **about)


def _place(shelf: Shelf, file: HostFile) -> str | None:
    path = collect.Arrivals(shelf.job, saves.known(shelf.job)).place("one", file)
    return None if path is None else str(path.relative_to(shelf.job.root))


def test_a_file_that_is_home_as_it_is_there_does_not_come_again(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    assert _place(shelf, _there(shelf.add(10))) is None


@pytest.mark.parametrize("fields", [{"size_bytes": 5}, {"mtime_s": 1}, {"mtime_s": 2_000_000_000}])
def test_another_file_of_the_same_name_comes_beside_it_whatever_its_time(
    tmp_path: Path, fields: dict[str, int]
) -> None:
    shelf = Shelf(tmp_path)
    file = _there(shelf.add(10), **fields)
    assert _place(shelf, file) == "from-hosts/one/checkpoints/step-10.pt"
    came = write(shelf.job.from_hosts / "one" / file.name, b"x" * file.size_bytes, file.mtime_s * S)
    assert _place(shelf, file) is None, "it has come"
    write(came, b"an older one")
    assert _place(shelf, file) == "from-hosts/one.2/checkpoints/step-10.pt", "and is not written over"


def test_a_file_that_is_missing_at_home_comes_into_its_place(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    lost = shelf.add(10, state=SaveState.GONE, why="it did not come home")
    torn = shelf.add(20, state=SaveState.TORN)
    for save in (lost, torn):
        (shelf.folder / save.main).unlink()
        assert _place(shelf, _there(save)) == f"checkpoints/{save.main}"


def test_what_a_person_has_damaged_at_home_comes_beside_it(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    save = shelf.add(10)
    write(shelf.folder / "step-10.pt", b"")
    assert _place(shelf, _there(save)) == "from-hosts/one/checkpoints/step-10.pt"


def test_what_was_pruned_or_written_over_by_a_save_that_is_home_does_not_come(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    pruned = shelf.add(10, state=SaveState.PRUNED)
    (shelf.folder / "step-10.pt").unlink()
    assert _place(shelf, _there(pruned)) is None
    before = shelf.add(20, {"last.pt": state(20)}, state=SaveState.GONE)
    shelf.add(30, {"last.pt": state(30)})
    assert _place(shelf, _there(before)) is None
    (shelf.folder / "last.pt").write_bytes(b"")
    assert _place(shelf, _there(before)) == "from-hosts/one/checkpoints/last.pt", (
        "the newer one is not home any more"
    )


def test_no_file_of_a_host_gets_into_a_whole_save_or_becomes_the_ledger(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    assert (
        _place(shelf, HostFile("checkpoints/ledger.jsonl", 5, 5)) == "from-hosts/one/checkpoints/ledger.jsonl"
    )
    shelf.add(10, {"step-10/a.pt": state(10)}, main="step-10")
    assert (
        _place(shelf, HostFile("checkpoints/step-10/b.pt", 5, 5)) == "from-hosts/one/checkpoints/step-10/b.pt"
    )


def test_what_came_beside_a_file_and_has_its_bytes_is_dropped(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    file, arrivals = _there(shelf.add(10), mtime_s=5), collect.Arrivals(shelf.job, {})
    other = write(shelf.job.from_hosts / "one" / file.name, state(11))
    assert not arrivals.drop_copy(file, other) and other.exists()
    same = write(shelf.job.from_hosts / "one" / file.name, state(10))
    assert arrivals.drop_copy(file, same) and not same.exists()


@pytest.mark.parametrize(
    ("name", "glob", "hidden"),
    [
        ("checkpoints/.x.part", "*", True), ("checkpoints/..", ".*", True), ("checkpoints/.step-1.torn-attempt-2/..", "*", True),
        ("checkpoints/step-1/.metadata", "*", False), ("checkpoints/.step-1.pt.torn-attempt-2", "*", False),
        ("checkpoints/.mine", ".mine/*", False), ("logs/.x", ".*", True),
    ],
)  # fmt: skip
def test_unfinished_files_stay_on_a_host_and_torn_saves_do_not(name: str, glob: str, hidden: bool) -> None:
    assert collect.CheckpointsThere("checkpoints", glob).hides(name) == hidden
