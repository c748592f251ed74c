"""Which files and folders count as complete checkpoints, looked at again and again as the agent does."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from orchestrator.agent.outputs.checkpoint_formats import Wholeness, inspect_shape, wholeness
from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch
from tests.support.saved_files import (
    NOW_NS,
    SAVED_NS,
    STEPPED_NS,
    S,
    begun,
    distributed,
    metadata,
    safetensors,
    scan_twice,
    write,
    zipped,
)
from tests.support.unprivileged import unprivileged


def test_a_checkpoint_counts_once_every_rank_has_stepped_after_its_last_byte(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    write(tmp_path / "step-10.pt", zipped())
    assert scan_twice(watch, stepped_ns=SAVED_NS - 1) == []
    assert scan_twice(watch, stepped_ns=SAVED_NS + 1) == ["step-10.pt"]
    assert scan_twice(watch, stepped_ns=SAVED_NS + 2) == []


def test_what_changes_between_two_looks_does_not_count_yet(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    write(tmp_path / "step-10.pt", zipped())
    assert watch.scan(STEPPED_NS, NOW_NS) == []
    write(tmp_path / "step-10.pt", zipped() * 2)
    assert watch.scan(STEPPED_NS, NOW_NS) == []
    assert len(watch.scan(STEPPED_NS, NOW_NS)) == 1


def test_without_steps_an_entry_must_have_stood_for_two_seconds(tmp_path: Path) -> None:
    watch = begun(tmp_path, "*.json")
    write(tmp_path / "state.json")
    assert scan_twice(watch, stepped_ns=0, now_ns=SAVED_NS + 2 * S) == []
    assert scan_twice(watch, stepped_ns=0, now_ns=SAVED_NS + 2 * S + 1) == ["state.json"]


def test_what_earlier_attempts_left_is_known_and_not_told_again(tmp_path: Path) -> None:
    write(tmp_path / "step-10.pt", zipped())
    watch = begun(tmp_path)
    assert scan_twice(watch) == []
    assert watch.last_scan(STEPPED_NS, True) == ([], [])


def test_a_rewritten_checkpoint_is_told_again(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    write(tmp_path / "last.pt", zipped())
    assert scan_twice(watch) == ["last.pt"]
    write(tmp_path / "last.pt", zipped(), SAVED_NS + 2 * S)
    assert scan_twice(watch, stepped_ns=SAVED_NS + 3 * S) == ["last.pt"]


@pytest.mark.parametrize(
    "name",
    [".step.pt", "tmp-step.pt", "tmpabc", "step.pt.tmp", "step.tmp3", "step_temp.pt", "step.pt.part", "step.pt.partial",
     "step.pt.incomplete", "step.pt.lock", "step.pt~"],
)  # fmt: skip
def test_temporary_names_never_count(tmp_path: Path, name: str) -> None:
    watch = begun(tmp_path)
    write(tmp_path / name / "model.pt" if "." not in name else tmp_path / name, zipped())
    assert scan_twice(watch) == []


@pytest.mark.parametrize(
    "name", ["model-part-1.pt", "attempt.pt", "template.pt", "locksmith.ckpt", "party.pt"]
)
def test_names_that_only_resemble_temporary_ones_count(tmp_path: Path, name: str) -> None:
    watch = begun(tmp_path)
    write(tmp_path / name, zipped())
    assert scan_twice(watch) == [name]


def test_under_the_default_glob_only_what_looks_like_a_checkpoint_counts(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    for name in ("metrics.json", "loss.png", "plots/loss.png", "hf/model.safetensors", "a.ckpt", "zero.pt"):
        write(tmp_path / name, b"" if name == "zero.pt" else safetensors())
    assert scan_twice(watch) == ["a.ckpt", "hf"]


def test_an_explicit_glob_may_name_anything_and_be_absolute(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    watch = begun(tmp_path / "checkpoints", f"{elsewhere}/run-*/state.json")
    write(elsewhere / "run-1" / "state.json")
    assert scan_twice(watch) == ["state.json"]


@pytest.mark.parametrize(
    ("name", "data", "known"),
    [
        ("a.pt", zipped(), Wholeness.WHOLE),
        ("a.pt", zipped()[:-1], Wholeness.TORN),
        ("a.pt", zipped()[:3000], Wholeness.TORN),
        ("a.pt", zipped() + b"more", Wholeness.TORN),
        ("a.safetensors", safetensors(), Wholeness.WHOLE),
        ("a.safetensors", safetensors(missing_bytes=1), Wholeness.TORN),
        ("a.safetensors", b"\x10", Wholeness.TORN),
        ("a.pt", b"", Wholeness.TORN),
        ("a.pt", b"\x80\x02pickled", Wholeness.UNKNOWN),
        ("a.json", b"{", Wholeness.UNKNOWN),
    ],
)
def test_formats_tell_what_they_can(tmp_path: Path, name: str, data: bytes, known: Wholeness) -> None:
    path = write(tmp_path / name, data)
    assert wholeness(path, inspect_shape(path)) is known


def test_a_folder_with_one_torn_file_or_a_marker_does_not_count(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    for name in ("torn", "marked", "good"):
        write(tmp_path / name / "model.pt", zipped())
        write(tmp_path / name / "trainer.json", b"")
    write(tmp_path / "torn" / "optimizer.pt", zipped()[:100])
    write(tmp_path / "marked" / "checkpoint-is-incomplete.txt")
    assert scan_twice(watch) == ["good"]


@pytest.mark.parametrize("gone", [".metadata", "__1_0.distcp"])
def test_a_folder_of_pieces_is_whole_only_with_its_metadata_and_all_that_this_names(
    tmp_path: Path, gone: str
) -> None:
    watch = begun(tmp_path)
    assert scan_twice(watch) == []
    whole, cut = distributed(tmp_path / "step-10"), distributed(tmp_path / "step-20")
    (cut / gone).unlink()
    assert wholeness(whole, inspect_shape(whole)) is Wholeness.WHOLE
    assert wholeness(cut, inspect_shape(cut)) is Wholeness.UNFINISHED
    assert scan_twice(watch) == ["step-10"]
    assert watch.last_scan(STEPPED_NS, all_ended_well=True) == ([], [])
    assert watch.torn() == [cut]


def test_where_other_hosts_have_the_other_pieces_what_is_here_is_told_without_them(tmp_path: Path) -> None:
    watch = CheckpointWatch(tmp_path, "*", in_parts=True)
    (distributed(tmp_path / "a") / ".metadata").unlink()
    (distributed(tmp_path / "b") / "__0_0.distcp").unlink()
    write(tmp_path / "torn" / "__0_0.distcp", zipped()[:3000])
    assert scan_twice(watch) == ["a", "b"]


def test_a_folder_that_its_metadata_proves_whole_needs_no_step_after_it(tmp_path: Path) -> None:
    watch = begun(tmp_path, "*step*")
    distributed(tmp_path / "step-10")
    lightning = distributed(tmp_path / "epoch=0-step=20.ckpt")
    write(distributed(tmp_path / "step-30") / "more.pt", zipped())
    found, _ = watch.last_scan(SAVED_NS - 1, all_ended_well=False)
    assert [one.path.name for one in found] == ["step-10"], "what else was to be saved there is not known"
    write(lightning / "meta.pt", zipped())
    found, _ = watch.last_scan(SAVED_NS - 1, all_ended_well=False)
    assert [one.path.name for one in found] == ["epoch=0-step=20.ckpt"]


def test_a_folder_of_pieces_that_is_written_again_counts_when_its_metadata_is_too(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    last = distributed(tmp_path / "last")
    assert scan_twice(watch) == ["last"]
    later_ns = SAVED_NS + 2 * S
    write(last / "__0_0.distcp", zipped() * 2, later_ns)
    assert scan_twice(watch, stepped_ns=later_ns + S) == []
    assert watch.last_scan(later_ns + S, all_ended_well=True) == ([], [last])
    distributed(last, later_ns)
    assert scan_twice(watch, stepped_ns=later_ns + S) == ["last"]


def test_a_metadata_is_read_and_never_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    write(tmp_path / "step-1" / "__0_0.distcp", zipped())
    evil = pickle.dumps([Evil(), "__0_0.distcp", "__1_0.distcp"], 4)
    write(tmp_path / "step-1" / ".metadata", evil)
    assert wholeness(tmp_path / "step-1", inspect_shape(tmp_path / "step-1")) is Wholeness.UNFINISHED
    write(tmp_path / "step-1" / "__1_0.distcp", zipped())
    assert wholeness(tmp_path / "step-1", inspect_shape(tmp_path / "step-1")) is Wholeness.WHOLE
    assert not (tmp_path / "ran").exists()


def test_ranks_that_save_without_collectives_have_a_metadata_each(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / "step-1" / f"__{rank}_0.distcp", zipped())
    write(tmp_path / "step-1" / "__0.metadata", metadata("__0_0.distcp"))
    assert wholeness(tmp_path / "step-1", inspect_shape(tmp_path / "step-1")) is not Wholeness.UNFINISHED


@pytest.mark.parametrize(
    ("index", "known"),
    [
        (json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}), "whole"),
        (json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-3.safetensors"}}), "unfinished"),
        ('{"weight_map": {"a": "model-1', "unfinished"),
        ('["of another kind"]', "whole"),
    ],
)
def test_weights_in_several_files_are_whole_with_all_that_their_index_names(
    tmp_path: Path, index: str, known: str
) -> None:
    folder = tmp_path / "checkpoint-10"
    for number in (1, 2):
        write(folder / f"model-{number}.safetensors", safetensors())
    write(folder / "model.safetensors.index.json", index.encode())
    assert (wholeness(folder, inspect_shape(folder)) is Wholeness.UNFINISHED) == (known == "unfinished")


def test_hidden_files_in_a_folder_are_no_sign_that_it_is_not_done(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    write(tmp_path / "step-1" / "model.pt", zipped())
    write(tmp_path / "step-1" / ".metadata", b"of another kind")
    write(tmp_path / "step-2" / "model.pt", zipped())
    write(tmp_path / "step-2" / ".model.pt.tmp", zipped())
    assert scan_twice(watch) == ["step-1"]


def test_when_all_ranks_are_gone_an_unproven_file_must_be_whole_by_its_format(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    write(tmp_path / "a.pt", zipped())
    write(tmp_path / "b.pt", zipped()[:3000])
    write(tmp_path / "c.pkl", b"\x80\x02pickled")
    write(tmp_path / "d" / "model.pt", zipped())
    found, spoiled = watch.last_scan(SAVED_NS - 1, all_ended_well=False)
    assert ([one.path.name for one in found], spoiled) == (["a.pt"], [])


def test_when_all_ranks_ended_well_everything_that_is_not_torn_counts(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    write(tmp_path / "c.pkl", b"\x80\x02pickled")
    write(tmp_path / "b.pt", zipped()[:3000])
    write(tmp_path / "d" / "model.pt", zipped())
    found, _ = watch.last_scan(SAVED_NS - 1, all_ended_well=True)
    assert {one.path.name for one in found} == {"c.pkl", "d"}


def test_a_checkpoint_that_was_told_and_then_cut_off_or_deleted_is_spoiled(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    last, gone = write(tmp_path / "last.pt", zipped()), write(tmp_path / "gone.pt", zipped())
    assert sorted(scan_twice(watch)) == ["gone.pt", "last.pt"]
    write(last, zipped()[:3000], SAVED_NS + 2 * S)
    gone.unlink()
    found, spoiled = watch.last_scan(STEPPED_NS, all_ended_well=False)
    assert (found, sorted(spoiled)) == ([], [gone, last])
    assert watch.torn() == [last]


def test_what_cannot_be_read_at_the_moment_is_not_spoiled(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    for name in ("step-10/a.pt", "step-10/b.pt", "step-20/a.pt"):
        write(tmp_path / name, zipped())
    assert len(scan_twice(watch)) == 2
    with unprivileged(tmp_path):
        (tmp_path / "step-10").chmod(0)  # as EIO on a disk that has lost its server
        assert watch.last_scan(STEPPED_NS, False) == ([], [])
        assert watch.torn() == []
        tmp_path.chmod(0)
        assert watch.last_scan(STEPPED_NS, False) == ([], [])
        tmp_path.chmod(0o755)


def test_what_can_be_deleted_only_in_part_is_no_checkpoint_any_more_and_a_circle_of_links_is_passed_over(
    tmp_path: Path,
) -> None:
    watch = begun(tmp_path)
    for number in (10, 20, 30):
        write(tmp_path / f"step-{number}/a.pt", zipped(), SAVED_NS + number)
        write(tmp_path / f"step-{number}/sub/b.pt", zipped(), SAVED_NS + number)
    (tmp_path / "latest").symlink_to("latest")
    assert len(scan_twice(watch)) == 3
    with unprivileged(tmp_path):
        (tmp_path / "step-10/sub").chmod(0o555)
        deleted = watch.prune(2, lambda before, after: True)
        assert [path.name for path in deleted] == ["step-10"] and scan_twice(watch) == []
        tmp_path.chmod(0o555)
        assert watch.prune(1, lambda before, after: True) == [] and (tmp_path / "step-20").exists()
        tmp_path.chmod(0o755)
        (tmp_path / ".step-10.deleted/sub").chmod(0o755)


def test_what_was_known_to_be_whole_and_has_changed_is_torn_unless_it_proves_itself(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    for name in ("a.pkl", "b.pkl", "c.pt"):
        write(tmp_path / name, zipped() if name == "c.pt" else b"pickled")
    assert len(scan_twice(watch)) == 3
    later = CheckpointWatch(tmp_path, "*", whole=watch.whole)
    for name in ("a.pkl", "c.pt"):
        write(tmp_path / name, (tmp_path / name).read_bytes(), SAVED_NS + 1)
    assert later.torn() == [tmp_path / "a.pkl"]


def test_a_folder_whose_name_is_a_pattern_is_looked_into(tmp_path: Path) -> None:
    folder = tmp_path / "runs [old] *"
    folder.mkdir()
    (folder / "step-1.pt").write_bytes(b"weights")
    watch = CheckpointWatch(folder, "step-*.pt")
    watch.begin()
    assert list(watch.reported) == [folder / "step-1.pt"]
