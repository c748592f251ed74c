"""Which files and folders count as complete checkpoints, looked at again and again as the agent does."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from orchestrator.node.checkpoints import CheckpointWatch
from orchestrator.node.formats import Wholeness, look, wholeness

S = 1_000_000_000
SAVED_NS = 1_000 * S
"""When the entries of these tests were written."""

STEPPED_NS = SAVED_NS + S
NOW_NS = SAVED_NS + S


def _zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("data.pkl", "x" * 5000)
    return out.getvalue()


def _safetensors(missing_bytes: int = 0) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, separators=(",", ":"))
    return struct.pack("<Q", len(header)) + header.encode() + bytes(16 - missing_bytes)


def _metadata(*pieces: str) -> bytes:
    """Return a pickle that names pieces where that of torch.distributed.checkpoint does."""
    stored = {number: {"relative_path": piece, "offset": 0} for number, piece in enumerate(pieces)}
    return pickle.dumps({"a.weight": "not.distcp.", "storage_data": stored}, 4)


def _distributed(folder: Path, at_ns: int = SAVED_NS, pieces: int = 2) -> Path:
    """Write a folder as torch.distributed.checkpoint does."""
    names = [f"__{rank}_0.distcp" for rank in range(pieces)]
    for name in names:
        _write(folder / name, _zip(), at_ns)
    _write(folder / ".metadata", _metadata(*names), at_ns)
    return folder


def _write(path: Path, data: bytes = b"data", at_ns: int = SAVED_NS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, ns=(at_ns, at_ns))
    return path


def _watch(folder: Path, pattern: str = "*") -> CheckpointWatch:
    watch = CheckpointWatch(folder, pattern)
    watch.begin()
    return watch


def _scan_twice(watch: CheckpointWatch, stepped_ns: int = STEPPED_NS, now_ns: int = NOW_NS) -> list[str]:
    """An entry must look the same twice, so the first look finds nothing new."""
    first = watch.scan(stepped_ns, now_ns)
    return [one.path.name for one in [*first, *watch.scan(stepped_ns, now_ns)]]


def test_a_checkpoint_counts_once_every_rank_has_stepped_after_its_last_byte(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    _write(tmp_path / "step-10.pt", _zip())
    assert _scan_twice(watch, stepped_ns=SAVED_NS - 1) == []
    assert _scan_twice(watch, stepped_ns=SAVED_NS + 1) == ["step-10.pt"]
    assert _scan_twice(watch, stepped_ns=SAVED_NS + 2) == []


def test_what_changes_between_two_looks_does_not_count_yet(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    _write(tmp_path / "step-10.pt", _zip())
    assert watch.scan(STEPPED_NS, NOW_NS) == []
    _write(tmp_path / "step-10.pt", _zip() * 2)
    assert watch.scan(STEPPED_NS, NOW_NS) == []
    assert len(watch.scan(STEPPED_NS, NOW_NS)) == 1


def test_without_steps_an_entry_must_have_stood_for_two_seconds(tmp_path: Path) -> None:
    watch = _watch(tmp_path, "*.json")
    _write(tmp_path / "state.json")
    assert _scan_twice(watch, stepped_ns=0, now_ns=SAVED_NS + 2 * S) == []
    assert _scan_twice(watch, stepped_ns=0, now_ns=SAVED_NS + 2 * S + 1) == ["state.json"]


def test_what_earlier_attempts_left_is_known_and_not_told_again(tmp_path: Path) -> None:
    _write(tmp_path / "step-10.pt", _zip())
    watch = _watch(tmp_path)
    assert _scan_twice(watch) == []
    assert watch.last_scan(STEPPED_NS, True) == ([], [])


def test_a_rewritten_checkpoint_is_told_again(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    _write(tmp_path / "last.pt", _zip())
    assert _scan_twice(watch) == ["last.pt"]
    _write(tmp_path / "last.pt", _zip(), SAVED_NS + 2 * S)
    assert _scan_twice(watch, stepped_ns=SAVED_NS + 3 * S) == ["last.pt"]


@pytest.mark.parametrize(
    "name",
    [".step.pt", "tmp-step.pt", "tmpabc", "step.pt.tmp", "step.tmp3", "step_temp.pt", "step.pt.part", "step.pt.partial",
     "step.pt.incomplete", "step.pt.lock", "step.pt~"],
)  # fmt: skip
def test_temporary_names_never_count(tmp_path: Path, name: str) -> None:
    watch = _watch(tmp_path)
    _write(tmp_path / name / "model.pt" if "." not in name else tmp_path / name, _zip())
    assert _scan_twice(watch) == []


@pytest.mark.parametrize(
    "name", ["model-part-1.pt", "attempt.pt", "template.pt", "locksmith.ckpt", "party.pt"]
)
def test_names_that_only_resemble_temporary_ones_count(tmp_path: Path, name: str) -> None:
    watch = _watch(tmp_path)
    _write(tmp_path / name, _zip())
    assert _scan_twice(watch) == [name]


def test_under_the_default_glob_only_what_looks_like_a_checkpoint_counts(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    for name in ("metrics.json", "loss.png", "plots/loss.png", "hf/model.safetensors", "a.ckpt", "zero.pt"):
        _write(tmp_path / name, b"" if name == "zero.pt" else _safetensors())
    assert _scan_twice(watch) == ["a.ckpt", "hf"]


def test_an_explicit_glob_may_name_anything_and_be_absolute(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    watch = _watch(tmp_path / "checkpoints", f"{elsewhere}/run-*/state.json")
    _write(elsewhere / "run-1" / "state.json")
    assert _scan_twice(watch) == ["state.json"]


@pytest.mark.parametrize(
    ("name", "data", "known"),
    [
        ("a.pt", _zip(), Wholeness.WHOLE),
        ("a.pt", _zip()[:-1], Wholeness.TORN),
        ("a.pt", _zip()[:3000], Wholeness.TORN),
        ("a.pt", _zip() + b"more", Wholeness.TORN),
        ("a.safetensors", _safetensors(), Wholeness.WHOLE),
        ("a.safetensors", _safetensors(missing_bytes=1), Wholeness.TORN),
        ("a.safetensors", b"\x10", Wholeness.TORN),
        ("a.pt", b"", Wholeness.TORN),
        ("a.pt", b"\x80\x02pickled", Wholeness.UNKNOWN),
        ("a.json", b"{", Wholeness.UNKNOWN),
    ],
)
def test_formats_tell_what_they_can(tmp_path: Path, name: str, data: bytes, known: Wholeness) -> None:
    path = _write(tmp_path / name, data)
    assert wholeness(path, look(path)) is known


def test_a_folder_with_one_torn_file_or_a_marker_does_not_count(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    for name in ("torn", "marked", "good"):
        _write(tmp_path / name / "model.pt", _zip())
        _write(tmp_path / name / "trainer.json", b"")
    _write(tmp_path / "torn" / "optimizer.pt", _zip()[:100])
    _write(tmp_path / "marked" / "checkpoint-is-incomplete.txt")
    assert _scan_twice(watch) == ["good"]


@pytest.mark.parametrize("gone", [".metadata", "__1_0.distcp"])
def test_a_folder_of_pieces_is_whole_only_with_its_metadata_and_all_that_this_names(
    tmp_path: Path, gone: str
) -> None:
    watch = _watch(tmp_path)
    assert _scan_twice(watch) == []
    whole, cut = _distributed(tmp_path / "step-10"), _distributed(tmp_path / "step-20")
    (cut / gone).unlink()
    assert wholeness(whole, look(whole)) is Wholeness.WHOLE
    assert wholeness(cut, look(cut)) is Wholeness.UNFINISHED
    assert _scan_twice(watch) == ["step-10"]
    assert watch.last_scan(STEPPED_NS, all_ended_well=True) == ([], [])
    assert watch.torn() == [cut]


def test_where_other_hosts_have_the_other_pieces_what_is_here_is_told_without_them(tmp_path: Path) -> None:
    watch = CheckpointWatch(tmp_path, "*", in_parts=True)
    (_distributed(tmp_path / "a") / ".metadata").unlink()
    (_distributed(tmp_path / "b") / "__0_0.distcp").unlink()
    _write(tmp_path / "torn" / "__0_0.distcp", _zip()[:3000])
    assert _scan_twice(watch) == ["a", "b"]


def test_a_folder_that_its_metadata_proves_whole_needs_no_step_after_it(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    _distributed(tmp_path / "step-10")
    lightning = _distributed(tmp_path / "epoch=0-step=20.ckpt")
    _write(_distributed(tmp_path / "step-30") / "more.pt", _zip())
    found, _ = watch.last_scan(SAVED_NS - 1, all_ended_well=False)
    assert [one.path.name for one in found] == ["step-10"], "what else was to be saved there is not known"
    _write(lightning / "meta.pt", _zip())
    found, _ = watch.last_scan(SAVED_NS - 1, all_ended_well=False)
    assert {one.path.name for one in found} == {"step-10", "epoch=0-step=20.ckpt"}


def test_a_folder_of_pieces_that_is_written_again_counts_when_its_metadata_is_too(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    last = _distributed(tmp_path / "last")
    assert _scan_twice(watch) == ["last"]
    later_ns = SAVED_NS + 2 * S
    _write(last / "__0_0.distcp", _zip() * 2, later_ns)
    assert _scan_twice(watch, stepped_ns=later_ns + S) == []
    assert watch.last_scan(later_ns + S, all_ended_well=True) == ([], [last])
    _distributed(last, later_ns)
    assert _scan_twice(watch, stepped_ns=later_ns + S) == ["last"]


def test_a_metadata_is_read_and_never_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    _write(tmp_path / "step-1" / "__0_0.distcp", _zip())
    evil = pickle.dumps([Evil(), "__0_0.distcp", "__1_0.distcp"], 4)
    _write(tmp_path / "step-1" / ".metadata", evil)
    assert wholeness(tmp_path / "step-1", look(tmp_path / "step-1")) is Wholeness.UNFINISHED
    _write(tmp_path / "step-1" / "__1_0.distcp", _zip())
    assert wholeness(tmp_path / "step-1", look(tmp_path / "step-1")) is Wholeness.WHOLE
    assert not (tmp_path / "ran").exists()


def test_ranks_that_save_without_collectives_have_a_metadata_each(tmp_path: Path) -> None:
    for rank in range(2):
        _write(tmp_path / "step-1" / f"__{rank}_0.distcp", _zip())
    _write(tmp_path / "step-1" / "__0.metadata", _metadata("__0_0.distcp"))
    assert wholeness(tmp_path / "step-1", look(tmp_path / "step-1")) is not Wholeness.UNFINISHED


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
        _write(folder / f"model-{number}.safetensors", _safetensors())
    _write(folder / "model.safetensors.index.json", index.encode())
    assert (wholeness(folder, look(folder)) is Wholeness.UNFINISHED) == (known == "unfinished")


def test_hidden_files_in_a_folder_are_no_sign_that_it_is_not_done(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    _write(tmp_path / "step-1" / "model.pt", _zip())
    _write(tmp_path / "step-1" / ".metadata", b"of another kind")
    _write(tmp_path / "step-2" / "model.pt", _zip())
    _write(tmp_path / "step-2" / ".model.pt.tmp", _zip())
    assert _scan_twice(watch) == ["step-1"]


def test_when_all_ranks_are_gone_an_unproven_file_must_be_whole_by_its_format(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    _write(tmp_path / "a.pt", _zip())
    _write(tmp_path / "b.pt", _zip()[:3000])
    _write(tmp_path / "c.pkl", b"\x80\x02pickled")
    _write(tmp_path / "d" / "model.pt", _zip())
    found, spoiled = watch.last_scan(SAVED_NS - 1, all_ended_well=False)
    assert ([one.path.name for one in found], spoiled) == (["a.pt"], [])


def test_when_all_ranks_ended_well_everything_that_is_not_torn_counts(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    _write(tmp_path / "c.pkl", b"\x80\x02pickled")
    _write(tmp_path / "b.pt", _zip()[:3000])
    _write(tmp_path / "d" / "model.pt", _zip())
    found, _ = watch.last_scan(SAVED_NS - 1, all_ended_well=True)
    assert {one.path.name for one in found} == {"c.pkl", "d"}


def test_a_checkpoint_that_was_told_and_then_cut_off_or_deleted_is_spoiled(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    last, gone = _write(tmp_path / "last.pt", _zip()), _write(tmp_path / "gone.pt", _zip())
    assert sorted(_scan_twice(watch)) == ["gone.pt", "last.pt"]
    _write(last, _zip()[:3000], SAVED_NS + 2 * S)
    gone.unlink()
    found, spoiled = watch.last_scan(STEPPED_NS, all_ended_well=False)
    assert (found, sorted(spoiled)) == ([], [gone, last])
    assert watch.torn() == [last]


def test_pruning_keeps_the_newest_and_leaves_alone_what_is_elsewhere_or_unknown(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    watch = _watch(folder)
    for step in range(1, 5):
        _write(folder / f"step-{step}.pt", _zip(), SAVED_NS + step)
    _write(folder / "notes.txt")
    _scan_twice(watch)
    _write(folder / "step-1.pt", _zip() * 2, SAVED_NS + 9)  # being rewritten
    watch.scan(STEPPED_NS, NOW_NS)
    assert [path.name for path in watch.prune(keep=1)] == ["step-2.pt", "step-3.pt"]
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "step-1.pt", "step-4.pt"]
    elsewhere = _watch(folder, f"{tmp_path}/other/*.pt")
    for step in range(3):
        _write(tmp_path / "other" / f"step-{step}.pt", _zip())
    _scan_twice(elsewhere)
    assert elsewhere.prune(keep=1) == []


def test_a_folder_whose_name_is_a_pattern_is_looked_into(tmp_path: Path) -> None:
    folder = tmp_path / "runs [old] *"
    folder.mkdir()
    (folder / "step-1.pt").write_bytes(b"weights")
    watch = CheckpointWatch(folder, "step-*.pt")
    watch.begin()
    assert list(watch.reported) == [folder / "step-1.pt"]
