"""Is a checkpoint described as it is, and is what is damaged found?"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import pytest

from orchestrator.agent.outputs import manifest as pieces_module
from orchestrator.agent.outputs.checkpoint_formats import inspect_shape
from orchestrator.agent.outputs.manifest import GivenUp, Hasher
from orchestrator.core.wire.messages import ManifestEntry

T = TypeVar("T")


def _run(work: Awaitable[T]) -> T:
    async def main() -> T:
        return await work

    return asyncio.run(main())


def _manifest(folder: Path, name: str) -> tuple[ManifestEntry, ...] | None:
    return _run(Hasher(folder).manifest(folder / name, inspect_shape(folder / name)))


def _save(path: Path, data: bytes) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return data


def test_a_file_is_one_piece_under_its_own_name(tmp_path: Path) -> None:
    data = _save(tmp_path / "last one.pt", os.urandom(3_000_000))
    mtime_ns = (tmp_path / "last one.pt").stat().st_mtime_ns
    digest = hashlib.sha256(data).hexdigest()
    assert _manifest(tmp_path, "last one.pt") == (ManifestEntry("last one.pt", 3_000_000, mtime_ns, digest),)


def test_a_folder_is_all_its_files_by_their_names_below_the_checkpoints(tmp_path: Path) -> None:
    for name in (
        "run/step-1/.metadata",
        "run/step-1/a/0.distcp",
        "run/step-1/b.distcp",
        "run/step-2/b.distcp",
    ):
        _save(tmp_path / name, name.encode())
    (tmp_path / "run/step-1/empty").touch()
    found = _manifest(tmp_path, "run/step-1")
    assert found is not None
    assert sorted(piece.name for piece in found) == [
        "run/step-1/.metadata",
        "run/step-1/a/0.distcp",
        "run/step-1/b.distcp",
        "run/step-1/empty",
    ]
    assert _run(Hasher(tmp_path).fault(found)) == ""


def test_what_is_written_meanwhile_has_no_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "a.pt", b"first")
    shape = inspect_shape(tmp_path / "a.pt")
    _save(tmp_path / "a.pt", b"second")
    assert _run(Hasher(tmp_path).manifest(tmp_path / "a.pt", shape)) is None
    (tmp_path / "a.pt").unlink()
    assert _run(Hasher(tmp_path).manifest(tmp_path / "a.pt", shape)) is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b"DATA" * 100), "another sha256 than when it was saved"),
        (lambda path: path.write_bytes(b"data"), "has 4 bytes instead of 400"),
        (lambda path: path.unlink(), "No such file or directory"),
        (lambda path: (path.unlink(), path.mkdir()), "step-1/b.bin"),
    ],
    ids=["changed", "short", "gone", "folder"],
)
def test_a_piece_that_is_not_as_it_was_is_named(tmp_path: Path, damage: object, words: str) -> None:
    for name in ("a.bin", "b.bin"):
        _save(tmp_path / "step-1" / name, b"data" * 100)
    found = _manifest(tmp_path, "step-1")
    assert found is not None
    assert callable(damage)
    damage(tmp_path / "step-1/b.bin")
    fault = _run(Hasher(tmp_path).fault(found))
    assert "step-1/b.bin" in fault
    assert words in fault


def test_a_time_that_did_not_travel_is_no_fault(tmp_path: Path) -> None:
    _save(tmp_path / "a.pt", b"data")
    found = _manifest(tmp_path, "a.pt")
    assert found is not None
    other = tuple(dataclasses.replace(piece, mtime_ns=1) for piece in found)
    assert _run(Hasher(tmp_path).fault(other)) == ""


def test_reading_is_given_up_when_the_agent_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "BLOCK_BYTES", 1)
    _save(tmp_path / "a.pt", bytes(5_000_000))
    hasher = Hasher(tmp_path)

    async def act() -> None:
        reading = asyncio.ensure_future(hasher.manifest(tmp_path / "a.pt", inspect_shape(tmp_path / "a.pt")))
        await asyncio.sleep(0)
        hasher.close()
        with pytest.raises((GivenUp, asyncio.CancelledError)):
            await asyncio.wait_for(reading, 10.0)

    asyncio.run(act())


def test_only_the_reading_thread_is_of_low_priority(tmp_path: Path) -> None:
    async def act() -> tuple[int, int]:
        hasher = Hasher(tmp_path)
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        there = await hasher._in_thread(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
        return own, there

    own, there = asyncio.run(act())
    assert there == min(19, own + pieces_module.NICENESS) or there == pieces_module.NICENESS
