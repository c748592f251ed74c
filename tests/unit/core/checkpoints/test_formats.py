"""Files that say of themselves whether they are whole, what else there must be, and their step."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.checkpoints import formats
from orchestrator.core.checkpoints.checkpoint import RequiredFile
from orchestrator.core.checkpoints.formats import NOTHING, FileReading
from tests.support.saved_files import (
    Model,
    adam,
    distributed,
    metadata,
    safetensors,
    torch_save,
    trainer_state,
    weights_index,
    zipped,
)
from tests.support.unprivileged import unprivileged

MB = 1 << 20


QUICK = settings(max_examples=150, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def put(root: Path, name: str, data: bytes) -> FileReading:
    """Write a file; return what it says."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(data)
    return formats.read_file(root, name, len(data))


def sparse(path: Path, size_bytes: int, head: bytes = b"") -> Path:
    """Make a file of that size that takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head)
    os.truncate(path, size_bytes)
    return path


WHOLE = {
    "a.pt": torch_save({"model": Model(), "optimizer": adam(), "step": 7}),
    "b.safetensors": safetensors({"format": "pt"}),
    "s/.metadata": metadata({"__0_0.distcp": [100, 300], "__1_0.distcp": [400]}),
    "s/__3.metadata": metadata({"__3_0.distcp": [400]}),
    "s/__0_0.distcp": distributed("s")["s/__0_0.distcp"],
    "c/model.safetensors.index.json": weights_index(["model-1.safetensors", "model-2.safetensors"]),
    "c/trainer_state.json": trainer_state(500),
    "c/meta_5.json": b'{"step": 5}',
}
"""A whole file of each format."""

PIECE = "s/__0_0.distcp"
"""Only the `.metadata` beside it knows how long it is."""


@pytest.mark.parametrize("name", WHOLE)
def test_complete_file_proves_itself_and_truncated_does_not(tmp_path: Path, name: str) -> None:
    """A complete file proves itself, and one that is cut off anywhere does not."""
    data = WHOLE[name]
    reading = put(tmp_path, name, data)
    assert reading.is_proved and not reading.fault
    for length in {*range(0, len(data), max(1, len(data) // 150)), len(data) - 1}:
        cut = put(tmp_path, name, data[:length])
        assert not cut.is_proved and (cut.fault or length < 9 or name == PIECE), f"{length} of {len(data)} bytes"


@pytest.mark.parametrize("name", WHOLE)
def test_file_with_unwritten_end_does_not_prove_itself(tmp_path: Path, name: str) -> None:
    data = WHOLE[name]
    for length in range(0, len(data) - 50, max(1, len(data) // 50)):
        assert not put(tmp_path, name, data[:length] + bytes(len(data) - length)).is_proved


def test_zip_with_extra_bytes_proves_nothing(tmp_path: Path) -> None:
    """A zip with extra bytes around it may be loadable and proves nothing."""
    whole = WHOLE["a.pt"]
    for data in (whole + b"more", b"PK\x03\x04" + whole):
        reading = put(tmp_path, "a.pt", data)
        assert (reading.fault, reading.is_proved, reading.step) == ("", False, 7)
    assert put(tmp_path, "b.safetensors", WHOLE["b.safetensors"] + b"more").fault
    assert put(tmp_path, "s/.metadata", WHOLE["s/.metadata"] + b"more").is_proved


def test_truncated_zip_of_zips_counts_no_inner_one(tmp_path: Path) -> None:
    data = zipped({"policy.pth": torch_save(Model()), "policy.optimizer.pth": torch_save(adam()), "data": bytes(900)})
    assert put(tmp_path, "a.zip", data).is_proved and put(tmp_path, "a.zip", data).has_optimizer
    for length in range(0, len(data), 7):
        assert not put(tmp_path, "a.zip", data[:length]).is_proved


@pytest.mark.parametrize("name", ["a.pt", "ckpt_5", "x.bin", "s/.metadata", "s/__0.metadata", "c/trainer_state.json"])
def test_empty_file_of_checkpoint_is_damaged(tmp_path: Path, name: str) -> None:
    assert put(tmp_path, name, b"").fault == "is empty"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.pt", b"\x80\x02pickled"),
        ("a.h5", b"\x89HDF"),
        ("a.txt", b""),
        (".metadata", b"of another kind"),
        ("ckpt_5", b"x"),
    ],
)
def test_file_of_other_format_gives_no_information(tmp_path: Path, name: str, data: bytes) -> None:
    """A file of another format says nothing."""
    assert put(tmp_path, name, data) == NOTHING


def test_metadata_names_files_with_lengths(tmp_path: Path) -> None:
    reading = put(tmp_path, "run/step-5/.metadata", metadata({"__0_0.distcp": [100, 300], "__1_0.distcp": [400]}))
    by = "run/step-5/.metadata"
    assert reading.needs == (
        RequiredFile("run/step-5/__0_0.distcp", 400, by), RequiredFile("run/step-5/__1_0.distcp", 400, by),
    )  # fmt: skip


def test_metadata_without_names_proves_nothing(tmp_path: Path) -> None:
    assert put(tmp_path, "s/.metadata", pickle.dumps({"of": "another kind"})) == NOTHING


def test_index_and_part_number_name_all_files(tmp_path: Path) -> None:
    """An index names its files, and a part number names all parts."""
    reading = put(tmp_path, "c/model.safetensors.index.json", weights_index(["b.safetensors", "a.safetensors"] * 3))
    assert [need.name for need in reading.needs] == ["c/a.safetensors", "c/b.safetensors"]
    assert [need.name for need in formats.find_numbered_parts("c/model-00002-of-00003.bin")] == [
        f"c/model-0000{part}-of-00003.bin" for part in (1, 2, 3)
    ]
    assert [need.name for need in formats.find_numbered_parts("w-0-of-2.pt")] == [
        "w-0-of-2.pt",
        "w-1-of-2.pt",
    ]
    assert (
        formats.find_numbered_parts("ckpt_5.pt")
        == formats.find_numbered_parts("a-1-of-0.pt")
        == formats.find_numbered_parts("a-1-of-99999999.pt")
        == ()
    )


@pytest.mark.parametrize(
    ("state", "has_optimizer", "is_weights"),
    [
        ({"model": Model(), "optimizer": adam()}, True, False),
        ({"state": {"deep": {"optimizers": [adam()]}}}, True, False),
        ({"model": Model(), "epoch": 3}, False, False),
        (Model(), False, True),
        (adam(), True, False),
        ({"last_epoch": 3}, False, False),
    ],
)
def test_optimizer_state_is_distinguished_from_weights(
    tmp_path: Path, state: dict[str, Any], has_optimizer: bool, is_weights: bool
) -> None:
    reading = put(tmp_path, "a.pt", torch_save(state))
    assert (reading.has_optimizer, reading.is_weights, reading.is_torch) == (has_optimizer, is_weights, True)


def test_state_references_its_best_checkpoint_by_name(tmp_path: Path) -> None:
    state = {
        "callbacks": {"best_model_path": "/x/y/epoch=0-step=5.ckpt", "dirpath": "/x/y"},
        "best": "checkpoint-7",
    }
    assert put(tmp_path, "a.ckpt", torch_save(state)).cites == ("epoch=0-step=5.ckpt", "checkpoint-7")
    assert put(tmp_path, "c/trainer_state.json", trainer_state(9, "out/checkpoint-5")).cites == ("checkpoint-5",)


@pytest.mark.parametrize("step", ["7", 7, "7" * 5000, "-7", "7.0", None, [], "\u0667"])
def test_safetensors_step_is_header_number(tmp_path: Path, step: Any) -> None:
    assert put(tmp_path, "a.safetensors", safetensors({"step": step})).step == (7 if step in ("7", 7) else None)


@pytest.mark.parametrize("step", [500, 0, -1, 1e3, "5", True, None, 10**400])
def test_trainer_state_step_is_an_integer(tmp_path: Path, step: Any) -> None:
    found = put(tmp_path, "c/trainer_state.json", json.dumps({"global_step": step}).encode()).step
    assert found == (step if step in (500, 0) and step is not False else None)


def test_json_lines_count_until_truncated(tmp_path: Path) -> None:
    """Lines of JSON are as good as one text until they are cut off."""
    lines = b'{"loss": 1}\n{"loss": 2}\n'
    assert put(tmp_path, "c/log.json", lines).is_proved
    assert put(tmp_path, "c/log.json", lines[:-3]).fault == "is cut off or damaged"


# What must cost nothing


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.safetensors", struct.pack("<Q", 2**63)), ("a.safetensors", struct.pack("<Q", 0)), ("a.safetensors", b"\xff" * 40),
        ("a.safetensors", b'\x1e\0\0\0\0\0\0\0{"w":{"data_offsets":[0,1e99]}}'[:38]),
        ("a.safetensors", struct.pack("<Q", 33) + b'{"w": {"data_offsets":[0,1e999]}}'),
        ("a.safetensors", struct.pack("<Q", 100_000) + b"[" * 100_000),
        ("c/trainer_state.json", b"[" * 1_000_000), ("c/trainer_state.json", b"[]"), ("c/trainer_state.json", b'"text"'),
        ("c/model.safetensors.index.json", b'{"a":' * 100_000), ("c/model.safetensors.index.json", b'{"weight_map": [1]}'),
        ("c/x.json", b"9" * 10_000), ("c/x.json", b"\xff\xfe\0\n"),
        ("s/.metadata", b"\x80\x04" + b"(" * 100_000), ("s/.metadata", b"\x80\x04\x8d" + b"\xff" * 8),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_headers_are_damage(tmp_path: Path, name: str, data: bytes) -> None:
    assert put(tmp_path, name, data).fault


@pytest.mark.slow
@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_bomb_is_not_unpacked(tmp_path: Path, kind: int) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as archive:
        archive.writestr("archive/data.pkl", bytes(32 * MB))
    assert len(out.getvalue()) < MB
    assert peak_bytes(lambda: put(tmp_path, "a.pt", out.getvalue())) < 2 * MB


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("a.safetensors", b""), ("a.safetensors", struct.pack("<Q", 50 * MB)), ("a.pt", b"PK\x03\x04"), ("a.pt", b""),
        ("s/.metadata", b"\x80\x04"), ("c/x.json", b"{"), ("c/trainer_state.json", b"{"), ("s/__0_0.distcp", b"PK\x03\x04"),
    ],
)  # fmt: skip
def test_little_is_read_of_huge_file(tmp_path: Path, name: str, head: bytes) -> None:
    """Little is read of a file of many gigabytes."""
    sparse(tmp_path / name, 20_000 * MB, head)
    assert peak_bytes(lambda: formats.read_file(tmp_path, name, 20_000 * MB)) < 4 * MB
    assert not formats.read_file(tmp_path, name, 20_000 * MB).is_proved


def peak_bytes(work: Callable[[], object]) -> int:
    """Return how much memory some work takes at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_oversized_header_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that is too large to be read is no damage."""
    monkeypatch.setattr(formats, "HEAD_BYTES_MAX", 100)
    monkeypatch.setattr(formats, "JSON_BYTES_MAX", 20)
    for name in ("s/.metadata", "b.safetensors", "c/trainer_state.json", "c/model.safetensors.index.json"):
        assert put(tmp_path, name, WHOLE[name]) == NOTHING


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_special_file_is_fault_without_blocking(tmp_path: Path, made: Callable[[Path], None]) -> None:
    made(tmp_path / "a.pt")
    assert formats.read_file(tmp_path, "a.pt", 10).fault.startswith("cannot be read")
    assert formats.find_damage(tmp_path, "a.pt", 10)[0].startswith("cannot be read")


def test_unreadable_file_is_fault_with_reason(tmp_path: Path) -> None:
    put(tmp_path, "a.pt", WHOLE["a.pt"])
    (tmp_path / "a.pt").chmod(0)
    with unprivileged(tmp_path):
        assert formats.read_file(tmp_path, "a.pt", 10).fault == "cannot be read: Permission denied"


def test_disk_error_inside_zip_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a.pt", WHOLE["a.pt"])

    def failing(_: object) -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(zipfile, "ZipFile", failing)
    reading = formats.read_file(tmp_path, "a.pt", 10)
    assert (reading.fault, reading.is_unsure) == ("cannot be read: Input/output error", True)
    with pytest.raises(OSError, match="Input/output error"):
        formats.verify_file(tmp_path, "a.pt", 10)


NAMES = st.sampled_from([*WHOLE, "x.npz", "x.zip", "c/x.index.json", "c/__0.metadata"])
HEADS = st.sampled_from([b"", b"PK\x03\x04", b"PK\x05\x06", b"\x80\x04", b"{", b"\x20\0\0\0\0\0\0\0{"])


@pytest.mark.slow
@given(NAMES, HEADS, st.binary(max_size=300), HEADS)
@QUICK
def test_reading_any_bytes_raises_nothing(tmp_path: Path, name: str, head: bytes, middle: bytes, tail: bytes) -> None:
    put(tmp_path, name, head + middle + tail + middle[:18])
    formats.find_damage(tmp_path, name, 10)


@pytest.mark.slow
@given(st.sampled_from(list(WHOLE.items())), st.data())
@settings(QUICK, max_examples=300)
def test_reading_changed_file_raises_nothing_and_fits_message(
    tmp_path: Path, whole: tuple[str, bytes], data: st.DataObject
) -> None:
    name, raw = whole[0], bytearray(whole[1])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.sampled_from([1, 1, 4]))] = data.draw(st.binary(max_size=8))
    reading = put(tmp_path, name, bytes(raw))
    assert all(need.size_bytes.bit_length() <= 64 for need in reading.needs)
    assert reading.step is None or 0 <= reading.step <= formats.STEP_MAX
    formats.find_damage(tmp_path, name, len(raw))


# All of a file


@pytest.mark.parametrize(
    ("name", "by"),
    [("a.pt", "CRC-32"), ("b.safetensors", "its length"), ("s/__0_0.distcp", "CRC-32"), ("x.h5", "")],
)
def test_whole_file_is_compared_with_format_checksums(tmp_path: Path, name: str, by: str) -> None:
    put(tmp_path, name, WHOLE.get(name, b"\x89HDF"))
    assert formats.find_damage(tmp_path, name, (tmp_path / name).stat().st_size) == ("", by)


def test_flipped_bit_is_found_by_torch_checksum(
    tmp_path: Path,
) -> None:
    """A flipped bit is found by the checksum of its record where torch has written one."""
    data = torch_save({"step": 7}, data=b"weights of a model" * 20)
    at = data.index(b"weights of a model")
    flipped = data[:at] + b"W" + data[at + 1 :]
    assert not put(tmp_path, "a.pt", flipped).fault
    fault, by = formats.find_damage(tmp_path, "a.pt", len(data))
    assert "data/0 has a wrong CRC-32" in fault and by == "CRC-32"


def test_torch_file_without_checksums_proves_no_bytes(tmp_path: Path) -> None:
    """Where torch has written no checksums nothing is said of the bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(WHOLE["a.pt"])) as whole, zipfile.ZipFile(out, "w") as archive:
        for record in whole.infolist():
            archive.writestr(record.filename, whole.read(record))
        for record in archive.infolist():
            record.CRC = 0
    reading = put(tmp_path, "a.pt", out.getvalue())
    assert (reading.is_proved, reading.step, reading.has_optimizer) == (True, 7, True)
    assert formats.find_damage(tmp_path, "a.pt", len(out.getvalue())) == ("", "")
