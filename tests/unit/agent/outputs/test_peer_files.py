"""Files between the memories of two agents, over real TLS on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.agent.outputs import peer_files
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import CheckpointFile, CopyTarget
from orchestrator.core.errors import Cancelled
from orchestrator.core.wire import connection
from orchestrator.spec import limits
from orchestrator.submission.credentials import new_certificate
from tests.support.memory_bench import CERTIFICATE, KEY, MEMORY_BYTES, MemoryBench, memory_bench, pieces, wait
from tests.support.saved_files import S, write

TOKEN = "c" * 64

pytestmark = pytest.mark.usefixtures("rooms")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, tuple[str]]]:
    """A folder that is served, and the address."""
    root = tmp_path / "root"
    root.mkdir()
    server = peer_files.PeerServer(TOKEN, CERTIFICATE, KEY, [root], tmp_path)
    yield root, (f"127.0.0.1:{server.server_address[1]}",)
    server.close()


def fetch(addresses: tuple[str, ...], root: Path, files: tuple[CheckpointFile, ...], stage: Path, **change: str) -> str:
    usual = {"token": TOKEN, "certificate_pem": CERTIFICATE, "root": str(root)}
    return peer_files.fetch(addresses, **{**usual, **change}, files=files, stage=stage, pace=disk.unlimited_pace)


def test_files_arrive_with_their_times(served: tuple[Path, tuple[str]], tmp_path: Path) -> None:
    root, addresses = served
    data = os.urandom(3 * peer_files.BLOCK_BYTES + 17)
    write(root / "step_5/a.pt", data, 5 * S)
    write(root / "step_5/empty", b"", 6 * S)
    files = pieces(root, "step_5/a.pt", "step_5/empty")
    assert fetch(("127.0.0.1:1", *addresses), root, files, tmp_path / "stage") == ""
    assert (tmp_path / "stage/step_5/a.pt").read_bytes() == data
    assert all(disk.matches_record(tmp_path / "stage", piece) for piece in files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "stage"], "the key's file is gone"


def test_other_version_is_not_taken(served: tuple[Path, tuple[str]], tmp_path: Path) -> None:
    root, addresses = served
    write(root / "a.pt", b"data", 5 * S)
    (piece,) = pieces(root, "a.pt")
    other = dataclasses.replace(piece, mtime_ns=6 * S)
    assert "not in this version" in fetch(addresses, root, (other,), tmp_path / "stage")
    write(root / "a.pt", b"atad", 5 * S)
    assert "sha256" in fetch(addresses, root, (piece,), tmp_path / "stage")
    assert not disk.matches_record(tmp_path / "stage", piece)
    (root / "a.pt").unlink()
    assert "cannot be had" in fetch(addresses, root, (piece,), tmp_path / "stage")
    assert fetch((), root, (piece,), tmp_path / "stage") == "the address of its agent is not known"


@pytest.mark.parametrize("what", ["token", "certificate"])
def test_stranger_gets_nothing(served: tuple[Path, tuple[str]], tmp_path: Path, what: str) -> None:
    root, addresses = served
    write(root / "a.pt")
    change = {"token": "d" * 64} if what == "token" else {"certificate_pem": new_certificate()[0].decode()}
    assert fetch(addresses, root, pieces(root, "a.pt"), tmp_path / "stage", **change) != ""
    assert not (tmp_path / "stage/a.pt").exists()


def test_only_regular_files_below_roots_are_sent(served: tuple[Path, tuple[str]], tmp_path: Path) -> None:
    root, addresses = served
    write(tmp_path / "secret", b"x")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)
    (root / "inside").symlink_to(write(root / "a.pt"))
    os.mkfifo(root / "pipe")
    for name in ("link", "folder/secret", "../secret", "pipe", "folder"):
        piece = CheckpointFile(name, 1, (tmp_path / "secret").stat().st_mtime_ns)
        assert fetch(addresses, root, (piece,), tmp_path / "stage") != "", name
    assert fetch(addresses, tmp_path, pieces(tmp_path, "secret"), tmp_path / "stage") != ""
    (tmp_path / "rooted").mkdir()
    (tmp_path / "rooted/stage").symlink_to(root)
    assert fetch(addresses, tmp_path / "rooted/stage", pieces(root, "inside"), tmp_path / "stage") == ""


def test_garbage_and_too_many_connections_are_cut_off(served: tuple[Path, tuple[str]], tmp_path: Path) -> None:
    root, addresses = served
    write(root / "a.pt")
    target = connection.parse_address(addresses[0])
    for text in (b"", b"garbage\n", f"{TOKEN} [1]\n".encode(), f"{TOKEN} {{}}\n".encode(), b"x" * (2 << 20)):
        context, plain = connection.client_context(CERTIFICATE), socket.create_connection(target, 5.0)
        with contextlib.suppress(OSError), context.wrap_socket(plain, server_hostname="orch") as tls:
            tls.sendall(text)
            assert not text or tls.recv(1) == b""
    strangers = [socket.create_connection(target, 5.0) for _ in range(peer_files.CONNECTIONS_MAX)]
    wait(lambda: threading.active_count() > peer_files.CONNECTIONS_MAX)
    assert fetch(addresses, root, pieces(root, "a.pt"), tmp_path / "stage") != ""
    for sock in strangers:
        sock.close()
    wait(lambda: fetch(addresses, root, pieces(root, "a.pt"), tmp_path / "stage") == "")


# Two agents


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[MemoryBench, MemoryBench]]:
    with memory_bench(tmp_path, "node-0") as one, memory_bench(tmp_path, "node-1") as other:
        one.memory.open(None)
        other.memory.open(None)
        yield one, other


def test_neighbour_keeps_the_newest_copies(pair: tuple[MemoryBench, MemoryBench]) -> None:
    one, other = pair
    reports = []
    for number in range(1, 4):
        one.save(f"step_{number}/a.pt", b"%d" % number, number * S)
        files = pieces(one.memory.folder, f"step_{number}/a.pt")
        reports.append(other.copy(number, files, CopyTarget.NEIGHBOUR, one.location(), peer=one))
    roots = [other.memory.folder.parent / f"neighbours/{number}" for number in range(1, 4)]
    assert [(done.error, done.root, done.names, done.dropped) for done in reports] == [
        ("", str(root), (f"step_{number}/a.pt",), (1,) if number == 3 else ()) for number, root in enumerate(roots, 1)
    ]
    assert [root.exists() for root in roots] == [False, True, True]
    assert (roots[2] / "step_3/a.pt").read_bytes() == b"3"


def test_five_times_the_files_of_a_checkpoint_are_enough_room(pair: tuple[MemoryBench, MemoryBench]) -> None:
    """Two that are stored, one that is being written, and two of another node: the older one of these makes room for the newest."""
    one, other = pair
    data = bytes(MEMORY_BYTES // 5 - 1000)
    for number in range(1, 4):
        other.save(f"own_{number}.pt", data)
    reports = []
    for number in range(1, 5):
        one.save(f"step_{number}.pt", data, number * S)
        files = pieces(one.memory.folder, f"step_{number}.pt")
        reports.append(other.copy(number, files, CopyTarget.NEIGHBOUR, one.location(), peer=one))
    assert [(done.error, done.dropped) for done in reports] == [("", ()), ("", ()), ("", (1,)), ("", (2,))]


def test_evicted_file_is_sent_from_disk(pair: tuple[MemoryBench, MemoryBench], rooms: list[int]) -> None:
    one, other = pair
    one.save("step_1.pt", b"1" * 99)
    files = pieces(one.memory.folder, "step_1.pt")
    one.copy(1, files)
    one.memory._link(1)
    assert (one.memory.folder / "step_1.pt").is_symlink()
    assert other.copy(1, files, CopyTarget.MEMORY, one.location(), peer=one).error == ""
    assert (other.memory.folder / "step_1.pt").read_bytes() == b"1" * 99


def test_checkpoint_comes_from_the_nearest_place(pair: tuple[MemoryBench, MemoryBench]) -> None:
    """Files that are here are not fetched again, and those of the own neighbours' folder are linked."""
    one, other = pair
    for name in ("step_1/a.pt", "step_1/b.pt", "step_1/c.pt"):
        one.save(name, name.encode())
    names = ("step_1/a.pt", "step_1/b.pt", "step_1/c.pt")
    files = pieces(one.memory.folder, *names)
    write(other.memory.folder / names[0], names[0].encode(), files[0].mtime_ns)
    kept = other.copy(1, files[1:2], CopyTarget.NEIGHBOUR, one.location(), peer=one)
    inode = (other.memory.folder / names[0]).stat().st_ino
    (one.memory.folder / names[0]).unlink()
    (one.memory.folder / names[1]).unlink()
    near = other.location(names[1], root=Path(kept.root))
    done = other.copy(1, files, CopyTarget.MEMORY, dataclasses.replace(near, host=""), one.location(), peer=one)
    assert (done.error, done.names, done.root) == ("", names, str(other.memory.folder))
    assert (other.memory.folder / names[0]).stat().st_ino == inode
    assert (other.memory.folder / names[1]).samefile(Path(kept.root, names[1]))
    assert (other.memory.folder / names[2]).read_bytes() == names[2].encode()


def test_overwritten_file_is_not_shared_with_neighbours(pair: tuple[MemoryBench, MemoryBench]) -> None:
    one, other = pair
    one.save("ckpt.pt", b"old")
    files = pieces(one.memory.folder, "ckpt.pt")
    kept = Path(other.copy(1, files, CopyTarget.NEIGHBOUR, one.location(), peer=one).root)
    other.save("ckpt.pt", b"torn", 9 * S)
    assert other.copy(1, files, CopyTarget.MEMORY, other.location(root=kept), is_overwritten=True).error == ""
    with (other.memory.folder / "ckpt.pt").open("r+b") as file:
        assert file.read() == b"old"
        file.write(b"new")
    assert (kept / "ckpt.pt").read_bytes() == b"old"


def test_source_that_vanishes_leaves_nothing(
    pair: tuple[MemoryBench, MemoryBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    one.save("step_1/a.pt", b"a")
    one.save("step_1/b.pt", bytes(5 * peer_files.BLOCK_BYTES))
    files, stamp = pieces(one.memory.folder, "step_1/a.pt", "step_1/b.pt"), peer_files._stamp
    monkeypatch.setattr(shutil, "copyfileobj", lambda file, stream, size: stream.write(file.read(1)))
    monkeypatch.setattr(
        peer_files, "_stamp", lambda file: stamp(file) if file.tell() < 1 or "a.pt" in file.name else _vanish()
    )
    done = other.copy(1, files, CopyTarget.MEMORY, one.location(), peer=one)
    assert done.error != "" and done.names == ()
    assert list(other.memory.folder.iterdir()) == []
    one.memory._server.close()
    assert other.copy(1, files, CopyTarget.NEIGHBOUR, one.location(), peer=one).error != ""
    assert not (other.memory.folder.parent / "neighbours/1").exists()


def _vanish() -> bytes:
    raise ConnectionResetError


def test_copy_without_room_is_refused(pair: tuple[MemoryBench, MemoryBench], rooms: list[int]) -> None:
    one, other = pair
    one.save("step_1.pt", bytes(1000))
    files = pieces(one.memory.folder, "step_1.pt")
    other.save("own_1.pt", bytes(MEMORY_BYTES - 999))
    done = other.copy(1, files, CopyTarget.NEIGHBOUR, one.location(), peer=one)
    assert (done.error, done.names) == ("0.0 GB do not fit into 0.0 GB", ())
    assert other.copy(1, files, CopyTarget.MEMORY, one.location(), peer=one).error == "", "to resume it may take more"
    (other.memory.folder / "step_1.pt").unlink()
    rooms[0] = 999
    assert "do not fit" in other.copy(1, files, CopyTarget.MEMORY, one.location(), peer=one).error


@pytest.mark.parametrize("name", ["../x.pt", "/tmp/orch-x.pt", "a/../../x.pt", "a\0.pt"])
def test_name_that_leads_out_is_refused(pair: tuple[MemoryBench, MemoryBench], name: str) -> None:
    one, other = pair
    files = (CheckpointFile(name, 4, 5),)
    for target in CopyTarget:
        assert other.copy(1, files, target, one.location(), peer=one).error == "a name leads out of the folder"


def test_copies_are_paced_and_end_when_agent_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_bench(tmp_path, copy_mb_s=10.0) as bench:
        slept = list[float]()
        monkeypatch.setattr(time, "sleep", slept.append)
        for _ in range(3):
            bench.memory._pace(1_000_000)
        assert [round(s, 1) for s in slept] == [0.1, 0.2, 0.3]
        bench.memory._drained = bench.memory._begin(bench.memory._drain)
        with pytest.raises(Cancelled):
            bench.memory._pace(1)


def test_copy_from_a_lost_host_has_ended_when_the_host_counts_as_lost() -> None:
    """What the next attempt begins from is fetched by the same thread, after a copy that still waits for a host without power."""
    assert peer_files.SILENCE_S_MAX < limits.NODE_TIMEOUT_SEEN_S
