"""What a job left: copied to one place, and brought from its hosts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from orchestrator.client import collect, job_checkpoints
from orchestrator.client.collect import CollectedFiles, FetchTargets
from orchestrator.client.job import Job
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointFile, CheckpointState
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import start_folder
from orchestrator.core.jobdir.plan import PlannedSsh
from orchestrator.supervisor.transfers.checkpoint_disk import LocalCheckpointFolders
from tests.support import folders, jobs
from tests.support.saved_files import write
from tests.unit.client.shelf import S, Shelf, state


def test_collect_copies_logs_checkpoints_post_mortem_without_secrets(
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
    to = collect.collect(Job(job), tmp_path / "to" / "new").folder
    names = sorted(str(path.relative_to(to)) for path in to.rglob("*") if path.is_file())
    assert names == [
        "checkpoints/step-5.pt", "code/lightning_logs/version_0/events.out.tfevents.7.node",
        "code/wandb/offline-run-7/files/a", "code/wandb/offline-run-7/run-7.wandb", "job.yaml", "journal.jsonl", "logs/attempt-001/rank-00000.log",
        "logs/attempt-001/rank-00001.log", "why.json",
    ]  # fmt: skip
    assert json.loads((to / "why.json").read_text())["attempts"][0]["verdict"]["kind"] == "crash"


def _collected(shelf: Shelf, tmp_path: Path, **how: bool) -> list[str]:
    """Return what is copied of a job's checkpoints, and of what lies where its ranks start."""
    to = collect.collect(Job(shelf.job), tmp_path / "to", **how).folder
    files = [path.relative_to(to) for path in to.rglob("*") if path.is_file()]
    return sorted(map(str, (file for file in files if file.parts[0] in ("checkpoints", "code"))))


@pytest.fixture
def started(tmp_path: Path) -> Shelf:
    """Return a job whose ranks have saved and written where they start, beside what its snapshot brought."""
    shelf = Shelf(tmp_path)
    write(shelf.job.code / "data" / "brought.pt", state(1))
    start_folder.record_snapshot_files(shelf.job, [Path("train.py"), Path("data/brought.pt")])
    shelf.add_at_start(10, {"out/s.pt": state(10)})
    shelf.add_at_start(
        20,
        {"out/step-1/a.pt": state(20)},
        main="out/step-1",
        state=CheckpointState.DISTRUSTED,
        why="no rank loads it",
    )
    write(shelf.job.code / "out" / "metrics.csv", b"loss")
    return shelf


def test_collect_copies_written_files_but_not_submitted_ones(started: Shelf, tmp_path: Path) -> None:
    """Files that ranks wrote in the start folder are copied, and those that orch copied there are not."""
    assert _collected(started, tmp_path) == [
        "checkpoints/ledger.jsonl", "code/out/metrics.csv", "code/out/s.pt", "code/out/step-1/a.pt",
    ]  # fmt: skip


def test_collected_files_are_counted(started: Shelf, tmp_path: Path) -> None:
    done = collect.collect(Job(started.job), tmp_path / "to")
    assert (done.folder, done.checkpoints, done.outside, done.left_out) == (tmp_path / "to", 1, (), ())
    assert done.others == 2, "one that may not be begun from is no checkpoint here"
    without = collect.collect(Job(started.job), tmp_path / "without", checkpoints=False)
    assert without.checkpoints == 0 and not (tmp_path / "without" / "code" / "out" / "s.pt").exists()


def test_too_many_other_files_are_left_unless_all(
    started: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too much that is no checkpoint is named and left unless the user wants all."""
    monkeypatch.setattr(collect, "OTHERS_BYTES_MAX", 3)
    done = collect.collect(Job(started.job), tmp_path / "some")
    (text,) = done.left_out
    assert text.startswith("2 files that ranks wrote (0.0 GB, no checkpoints) were not copied: code/out/step-1/a.pt")
    assert done.others == 0 and not (tmp_path / "some" / "code" / "out" / "metrics.csv").exists()
    assert (tmp_path / "some" / "code" / "out" / "s.pt").exists(), "a checkpoint comes whatever its size"
    assert "code/out/metrics.csv" in _collected(started, tmp_path / "all", everything=True)


def test_checkpoint_outside_job_folder_is_named_not_copied(tmp_path: Path) -> None:
    shelf, scratch = Shelf(tmp_path), tmp_path / "scratch"
    shelf.add(10, {"last.pt": state(10)}, root=scratch, prefix=f"{scratch}/")
    done = collect.collect(Job(shelf.job), tmp_path / "to")
    assert (done.checkpoints, done.outside) == (0, (str(scratch / "last.pt"),))
    assert not list((tmp_path / "to").rglob("last.pt"))


def test_checkpoint_behind_link_is_named_at_target(tmp_path: Path) -> None:
    shelf, scratch = Shelf(tmp_path), tmp_path / "scratch"
    scratch.mkdir()
    shelf.job.code.mkdir(parents=True, exist_ok=True)
    (shelf.job.code / "out").symlink_to(scratch)
    shelf.add_at_start(10, {"out/s.pt": state(10)})
    done = collect.collect(Job(shelf.job), tmp_path / "to")
    assert (done.checkpoints, done.outside) == (0, (str(scratch / "s.pt"),))


def test_checkpoint_complete_only_in_kept_copy_is_copied(tmp_path: Path) -> None:
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
def test_file_vanishing_during_copy_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
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

    def copy_and_prune(source: Path, target: Path, **more: bool) -> Path:
        is_there = (job.checkpoints / "step-2.pt").exists() and source.suffix == ".pt"
        if is_there and (when == "before" or source.name != "step-1.pt"):
            copied = copy(source, target, **more) if when == "after" else None
            prune()
            return copied or copy(source, target, **more)
        return copy(source, target, **more)

    monkeypatch.setattr(shutil, "copyfile", copy_and_prune)
    to = collect.collect(Job(job), tmp_path / "to").folder
    assert (to / "checkpoints/step-1.pt").read_text() == "x"


def test_collected_files_have_safe_permissions(tmp_path: Path) -> None:
    """Collected files have no set-user-ID bits, and others cannot write to them."""
    job = folders.failed(tmp_path)
    job.rank_log(1, 1).chmod(0o6777)
    job.attempt_logs(1).chmod(0o777)
    job.spec.chmod(0o600)
    collect.collect(Job(job), tmp_path / "to")
    folder = tmp_path / "to" / "logs" / "attempt-001"
    modes = [path.stat().st_mode & 0o7777 for path in (folder, folder / "rank-00001.log", tmp_path / "to" / "job.yaml")]
    assert modes == [0o755, 0o755, 0o600]
    assert (folder / "rank-00001.log").stat().st_mtime == job.rank_log(1, 1).stat().st_mtime


def test_collect_without_folder_shows_locations(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    assert collect.collect(Job(job), None) == CollectedFiles(job.root, 0, 0)


@pytest.mark.parametrize("to", ["full", "file", "inside", "circle", "x" * 5000])
def test_unsuitable_target_folder_is_refused(tmp_path: Path, to: str) -> None:
    job = folders.failed(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    (tmp_path / "file").touch()
    place = job.logs / "copy" if to == "inside" else tmp_path / to
    with pytest.raises(UserError) as told:
        collect.collect(Job(job), place)
    assert told.value.fix and not (job.logs / "copy").exists()


def test_failing_copy_is_a_cluster_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be copied"):
        collect.collect(Job(folders.failed(tmp_path)), Path("/proc/no/such"))


@pytest.mark.parametrize("to", ["there", "new/one"])
def test_failed_copy_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """A copy that fails half-way leaves nothing."""
    job = folders.failed(tmp_path / "home")
    (job.checkpoints / "zz_bad").touch()
    (tmp_path / "there").mkdir()
    before, copyfile = sorted(tmp_path.rglob("*")), shutil.copyfile

    def copied(source: Path, target: Path, **more: bool) -> Path:
        if source.name == "zz_bad":
            raise OSError(5, "Input/output error", str(source))
        return copyfile(source, target, **more)

    monkeypatch.setattr(shutil, "copyfile", copied)
    with pytest.raises(ClusterError, match=r"cannot be copied: .*Input/output error"):
        collect.collect(Job(job), tmp_path / to)
    assert sorted(tmp_path.rglob("*")) == before


def test_special_file_is_named_and_rest_copied(tmp_path: Path) -> None:
    job = folders.failed(tmp_path / "home")
    os.mkfifo(job.checkpoints / "pipe")
    (job.checkpoints / "own").write_text("x")
    found = collect.collect(Job(job), tmp_path / "to")
    assert found.skipped == (f"{job.checkpoints / 'pipe'} is not a file or folder, and was not copied",)
    assert (tmp_path / "to/checkpoints/own").exists() and not (tmp_path / "to/checkpoints/pipe").exists()


def test_copy_with_uncreatable_folder_leaves_no_parents(tmp_path: Path) -> None:
    """A copy whose folder cannot be made leaves none of its parent folders."""
    with pytest.raises(ClusterError, match="too long"):
        collect.collect(Job(folders.failed(tmp_path)), tmp_path / "new" / ("x" * 300))
    assert not (tmp_path / "new").exists()


# What hosts still have


def _arrivals(shelf: Shelf) -> FetchTargets:
    return FetchTargets(
        shelf.job, LocalCheckpointFolders(shelf.job, shelf.plan), job_checkpoints.load_checkpoints(shelf.job)
    )


def _there(save: Checkpoint, **fields: int) -> CheckpointFile:
    """Return the file of a save as a host has it."""
    piece = save.files[0]
    size_bytes = fields.get("size_bytes", piece.size_bytes)
    return CheckpointFile(f"checkpoints/{piece.name}", size_bytes, fields.get("mtime_ns", piece.mtime_ns // S * S))


def _place(shelf: Shelf, file: CheckpointFile) -> str | None:
    path = _arrivals(shelf).target("one", file)
    return None if path is None else str(path.relative_to(shelf.job.root))


def test_unchanged_local_file_is_not_fetched_again(tmp_path: Path) -> None:
    """A file that the job folder has unchanged is not fetched again."""
    shelf = Shelf(tmp_path)
    assert _place(shelf, _there(shelf.add(10))) is None


@pytest.mark.parametrize("fields", [{"size_bytes": 5}, {"mtime_ns": S}, {"mtime_ns": 2_000_000_000 * S}])
def test_different_file_of_same_name_is_put_beside(tmp_path: Path, fields: dict[str, int]) -> None:
    """Another file of the same name is put beside it, whatever its time."""
    shelf = Shelf(tmp_path)
    file = _there(shelf.add(10), **fields)
    assert _place(shelf, file) == "from-hosts/one/checkpoints/step-10.pt"
    came = write(shelf.job.from_hosts / "one" / file.name, b"x" * file.size_bytes, file.mtime_ns)
    assert _place(shelf, file) is None, "it has come"
    write(came, b"an older one")
    assert _place(shelf, file) == "from-hosts/one.2/checkpoints/step-10.pt", "and is not written over"


def test_file_missing_locally_is_put_in_place(tmp_path: Path) -> None:
    """A file that the job folder lacks is put in its place."""
    shelf = Shelf(tmp_path)
    lost = shelf.add(10, state=CheckpointState.GONE, why="it did not come home")
    torn = shelf.add(20, state=CheckpointState.TORN)
    for save in (lost, torn):
        (shelf.folder / save.main).unlink()
        assert _place(shelf, _there(save)) == f"checkpoints/{save.main}"


def test_locally_damaged_file_is_fetched_beside_it(tmp_path: Path) -> None:
    """A file that the user has damaged in the job folder is fetched beside it."""
    shelf = Shelf(tmp_path)
    save = shelf.add(10)
    write(shelf.folder / "step-10.pt", b"")
    assert _place(shelf, _there(save)) == "from-hosts/one/checkpoints/step-10.pt"


def test_pruned_or_superseded_file_is_not_fetched(tmp_path: Path) -> None:
    """A pruned file, or one that a fetched checkpoint overwrote, is not fetched."""
    shelf = Shelf(tmp_path)
    pruned = shelf.add(10, state=CheckpointState.PRUNED)
    (shelf.folder / "step-10.pt").unlink()
    assert _place(shelf, _there(pruned)) is None
    before = shelf.add(20, {"last.pt": state(20)}, state=CheckpointState.GONE)
    shelf.add(30, {"last.pt": state(30)})
    assert _place(shelf, _there(before)) is None
    (shelf.folder / "last.pt").write_bytes(b"")
    assert _place(shelf, _there(before)) == "from-hosts/one/checkpoints/last.pt", "the newer one is not home any more"


def test_host_file_never_enters_complete_checkpoint_or_ledger(tmp_path: Path) -> None:
    """No file of a host gets into a complete checkpoint or becomes the ledger."""
    shelf = Shelf(tmp_path)
    assert (
        _place(shelf, CheckpointFile("checkpoints/ledger.jsonl", 5, 5 * S)) == "from-hosts/one/checkpoints/ledger.jsonl"
    )
    shelf.add(10, {"step-10/a.pt": state(10)}, main="step-10")
    assert (
        _place(shelf, CheckpointFile("checkpoints/step-10/b.pt", 5, 5 * S)) == "from-hosts/one/checkpoints/step-10/b.pt"
    )


def test_duplicate_beside_file_is_dropped(tmp_path: Path) -> None:
    """A file beside another with the same bytes is dropped."""
    shelf = Shelf(tmp_path)
    file, arrivals = _there(shelf.add(10), mtime_ns=5 * S), _arrivals(shelf)
    other = write(shelf.job.from_hosts / "one" / file.name, state(11))
    assert not arrivals.drop_duplicate(file, other) and other.exists()
    same = write(shelf.job.from_hosts / "one" / file.name, state(10))
    assert arrivals.drop_duplicate(file, same) and not same.exists()


def test_host_files_of_start_folder_get_their_place(tmp_path: Path) -> None:
    """Files that ranks wrote in the start folder of a host are put in their place."""
    shelf = Shelf(tmp_path)
    assert _place(shelf, CheckpointFile("code/out/metrics.csv", 5, 5 * S)) == "code/out/metrics.csv"
    own = shelf.add_at_start(10, {"out/s.pt": state(10)})
    there = CheckpointFile("code/out/s.pt", own.files[0].size_bytes, own.files[0].mtime_ns // S * S)
    assert _place(shelf, there) is None
    over = shelf.add_at_start(20, {"last.pt": state(20)}, state=CheckpointState.PRUNED)
    assert _place(shelf, CheckpointFile("code/last.pt", over.size_bytes, over.files[0].mtime_ns // S * S)) is None


def test_checkpoint_path_match_in_start_folder_joins_checkpoints(tmp_path: Path) -> None:
    """Files in the start folder that match checkpoint.path are put among the checkpoints."""
    shelf = Shelf(tmp_path)
    shelf.replan(checkpoint_glob="{job_dir}/code/out/*", ssh=PlannedSsh(None, None, "known", "~/.orch", (), None))
    assert _place(shelf, CheckpointFile("code/out/s.pt", 5, 5 * S)) == "checkpoints/out/s.pt"
    assert _place(shelf, CheckpointFile("code/s.pt", 5, 5 * S)) == "code/s.pt"
    save = shelf.add(10, {"out/s.pt": state(10)})
    there = CheckpointFile("code/out/s.pt", save.size_bytes, save.written_ns // S * S)
    assert _place(shelf, there) is None, "it came home while the job ran"
    assert _arrivals(shelf).too_large([there], 1) == {}


def test_too_much_on_host_is_named_except_checkpoints(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.add_at_start(10, {"s.pt": state(10)})
    files = [
        CheckpointFile("code/s.pt", 500, 5 * S),
        CheckpointFile("code/big.bin", 70, 5 * S),
        CheckpointFile("checkpoints/x.pt", 900, 5 * S),
    ]
    assert _arrivals(shelf).too_large(files, 70) == {}
    assert _arrivals(shelf).too_large(files, 69) == {"code/big.bin": 70}


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("checkpoints/.coming", True), ("checkpoints/.kept", True), ("checkpoints/.mine", False), ("checkpoints/.step-1.torn-attempt-2/a", False),
        ("checkpoints/step-1/.metadata", False), ("checkpoints/.step-1.pt.torn-attempt-2", False), ("checkpoints/step-1.pt", False),
        ("logs/.x", True), ("code/.hydra", False), ("code/models/__pycache__", True),
    ],
)  # fmt: skip
def test_unfinished_orch_files_stay_on_host(name: str, hidden: bool) -> None:
    """Unfinished files of orch stay on a host, and files that ranks wrote do not."""
    assert collect.is_hidden(name) == hidden


def test_only_checkpoints_and_start_folder_are_of_ranks() -> None:
    """Ranks write checkpoints and files in the folder where they start."""
    names = ("checkpoints/a.pt", "code/a.pt", "logs/a.log", "evidence/a", "codes/a")
    assert [collect.is_rank_file(name) for name in names] == [True, True, False, False, False]
