"""Bulk copies over a real sshd, by rsync and by SFTP: any names, whole files, clear faults."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.backends.api import Copy, CopyResult, Direction
from orchestrator.backends.ssh.connect import ssh_config
from orchestrator.backends.ssh.connect.connection import Connection, JumpHosts
from orchestrator.backends.ssh.copy import copy_queue, sftp
from orchestrator.backends.ssh.copy.copy_queue import CopyQueue
from orchestrator.core.checkpoints.checkpoint import CheckpointFile
from tests.support.sshd import LOOPBACK, Desk, Sshd, is_over, needs_sshd

pytestmark = [
    needs_sshd,
    pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync: apt install rsync"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]

END_S_MAX = 60.0
SAVED_NS = 1_700_000_000_123_456_789
NAMES = (
    "plain.pt",
    "with blank.pt",
    'it\'s "quoted".pt',
    "-dash.pt",
    "#hash.pt",
    ";semicolon.pt",
    "new\nline.pt",
    "ünïcödé/模型.pt",
    "$HOME`id`/a b/*.pt",
    "not\udcffutf8.pt",
    "n" * 250 + ".pt",
)


def piece(folder: Path, name: str) -> CheckpointFile:
    path = folder / name
    stat = path.stat()
    return CheckpointFile(name, stat.st_size, stat.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())


def write(folder: Path, name: str, data: bytes, at_ns: int | None = None) -> CheckpointFile:
    """Write a file in place, of this time or of now."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if at_ns is not None:
        os.utime(path, ns=(at_ns, at_ns))
    return piece(folder, name)


class Host:
    """A host, the copies from and to it, and a folder on it and at home."""

    def __init__(self, desk: Desk, tmp_path: Path, settings: str, has_rsync: bool, mb_s: float | None) -> None:
        # Sessions get a home without a .bashrc, which may do anything.
        self.server: Sshd = desk.start(f"SetEnv HOME={desk.home}\n{settings}")
        desk.know(self.server)
        self.there, self.here = tmp_path / "there", tmp_path / "here"
        self.there.mkdir()
        self.jumps = JumpHosts()
        self.connection: Connection | None = None
        self.news = threading.Event()
        self.copies = CopyQueue(lambda _: self.connection, lambda _: has_rsync, self.news.set, mb_s)
        self.connect()

    def connect(self) -> None:
        target = ssh_config.resolve(LOOPBACK, port=self.server.port)
        self.connection = Connection.open(target, host_keys="strict", jumps=self.jumps)

    def begin(
        self,
        direction: Direction,
        names: tuple[str, ...],
        wanted: tuple[CheckpointFile, ...] = (),
        there: tuple[str, ...] = (),
    ) -> None:
        self.copies.copy(Copy("key", "node1", direction, str(self.there), self.here, names, wanted, there))

    def wait(self) -> list[CopyResult]:
        assert self.news.wait(END_S_MAX)
        self.news.clear()
        return self.copies.copied()

    def fetch(self, *pieces: CheckpointFile) -> str:
        """Fetch files; return what went wrong."""
        self.begin(Direction.FETCH, tuple(one.name for one in pieces), pieces)
        (done,) = self.wait()
        return done.error

    def send(self, *names: str, there: tuple[str, ...] = ()) -> str:
        """Send files, of which those of `there` are the host's own; return what went wrong."""
        self.begin(Direction.SEND, names, there=there)
        (done,) = self.wait()
        return done.error

    def close(self) -> None:
        self.copies.close()
        if self.connection is not None:
            self.connection.close()
        self.jumps.close()


StartHost = Callable[..., Host]


@pytest.fixture
def start(desk: Desk, tmp_path: Path) -> Iterator[StartHost]:
    """Start a host, with settings of its sshd."""
    hosts: list[Host] = []

    def one(settings: str = "", has_rsync: bool = True, mb_s: float | None = None) -> Host:
        hosts.append(Host(desk, tmp_path, settings, has_rsync, mb_s))
        return hosts[-1]

    yield one
    for host in hosts:
        host.close()


NOISY = "ForceCommand sh -c 'echo welcome to the noisy host; eval \"$SSH_ORIGINAL_COMMAND\"'"
BANNER = "Banner {}"
NO_SFTP = 'ForceCommand sh -c \'case "$SSH_ORIGINAL_COMMAND" in *sftp*) exit 1;; esac; eval "$SSH_ORIGINAL_COMMAND"\''
WAYS = [("", True), ("", False), (NOISY, True), (BANNER, True), (NO_SFTP, True)]
WAY_IDS = ["rsync", "sftp", "noisy shell", "banner", "no sftp-server"]


@pytest.mark.parametrize(("settings", "has_rsync"), WAYS, ids=WAY_IDS)
def test_odd_file_names_survive_both_directions(
    start: StartHost, tmp_path: Path, settings: str, has_rsync: bool
) -> None:
    """Files of every name are fetched and sent back."""
    (tmp_path / "banner").write_text("Welcome. 100% of this host is watched.\n\norch-differs\n")
    host = start(settings.format(tmp_path / "banner"), has_rsync)
    pieces = [write(host.there, name, os.urandom(n * 1000)) for n, name in enumerate(NAMES)]
    assert host.fetch(*pieces) == ""
    assert [piece(host.here, one.name) for one in pieces] == pieces
    left = {path.relative_to(host.here) for path in host.here.rglob("*") if path.is_file()}
    assert left == {Path(name) for name in NAMES}, "nothing else is left"
    shutil.rmtree(host.there)
    assert host.send(*NAMES) == ""
    assert [(host.there / name).read_bytes() for name in NAMES] == [(host.here / n).read_bytes() for n in NAMES]
    assert {path.relative_to(host.there) for path in host.there.rglob("*") if path.is_file()} == left


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_rsync_is_used_where_both_ends_have_it(start: StartHost, tmp_path: Path, has_rsync: bool) -> None:
    ran = tmp_path / "ran"
    host = start(
        f'ForceCommand sh -c \'echo "$SSH_ORIGINAL_COMMAND" >> {ran}; eval "$SSH_ORIGINAL_COMMAND"\'',
        has_rsync,
    )
    assert host.fetch(write(host.there, "a.pt", b"data")) == ""
    assert ("rsync --server" in ran.read_text()) is has_rsync


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_large_file_is_copied_whole(start: StartHost, has_rsync: bool) -> None:
    host = start("", has_rsync)
    block = os.urandom(1 << 20)
    large = write(host.there, "large.pt", b"".join(bytes([n]) + block for n in range(40)))
    assert host.fetch(large) == ""
    assert piece(host.here, "large.pt") == large


def test_file_already_fetched_is_not_copied_again(start: StartHost) -> None:
    """A file that the job folder already has is not copied again."""
    host = start("", False)
    wanted = write(host.there, "a.pt", b"data")
    assert host.fetch(wanted) == ""
    inode = (host.here / "a.pt").stat().st_ino
    assert host.fetch(wanted) == ""
    assert (host.here / "a.pt").stat().st_ino == inode


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_deleted_file_is_reported_at_once(start: StartHost, has_rsync: bool) -> None:
    host = start("", has_rsync)
    wanted = write(host.there, "a.pt", b"data")
    (host.there / "a.pt").unlink()
    error = host.fetch(wanted)
    assert "node1" in error and ("deleted" in error or "does not exist" in error)


AGAIN = "a.pt was written again on node1 before it was copied"


@pytest.mark.parametrize("later_ns", [10**9, 10**8], ids=["another second", "the same second"])
@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_rewritten_file_is_rejected_by_bytes_or_time(start: StartHost, has_rsync: bool, later_ns: int) -> None:
    """A file that was rewritten is rejected, even if only its bytes or its time differ."""
    host = start("", has_rsync)
    wanted = write(host.there, "a.pt", b"data", SAVED_NS)
    write(host.there, "a.pt", b"more", SAVED_NS + later_ns)
    error = host.fetch(wanted)
    assert error == AGAIN or (not has_rsync and later_ns < 10**9 and error == "a.pt arrived damaged from node1 twice")


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
@pytest.mark.parametrize("is_hashed", [True, False], ids=["hashed", "not hashed"])
def test_file_rewritten_during_copy_is_rejected(start: StartHost, has_rsync: bool, is_hashed: bool) -> None:
    """A file that is overwritten while it is copied is rejected."""
    host = start("", has_rsync, 2.0)
    wanted, other = write(host.there, "a.pt", os.urandom(8_000_000), SAVED_NS), os.urandom(8_000_000)
    if not is_hashed:
        wanted = dataclasses.replace(wanted, sha256="")
    host.begin(Direction.FETCH, ("a.pt",), (wanted,))
    until(lambda: host.copies.progress().get("key", 0) > 0)
    write(host.there, "a.pt", other)  # in place, and as long as before
    assert not host.news.is_set()
    (done,) = host.wait()
    assert done.error == AGAIN


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_file_rewritten_during_copy_of_sibling_is_rejected(start: StartHost, has_rsync: bool) -> None:
    """A file that is overwritten while another file of its checkpoint is copied is rejected."""
    host = start("", has_rsync, 2.0)
    first = write(host.there, "s/a.pt", b"data", SAVED_NS)
    large = write(host.there, "s/b.pt", os.urandom(8_000_000))
    host.begin(Direction.FETCH, ("s/b.pt", "s/a.pt"), (large, first))
    until(lambda: host.copies.progress().get("key", 0) > 0)
    write(host.there, "s/a.pt", b"more")
    assert not host.news.is_set()
    (done,) = host.wait()
    assert done.error == "s/a.pt was written again on node1 before it was copied"


def test_damaged_copy_is_retried_once_then_fails(start: StartHost) -> None:
    """A file that arrives damaged is copied once more and then given up."""
    host = start("", False)
    good = write(host.there, "a.pt", b"data")
    bad = CheckpointFile(good.name, good.size_bytes, good.mtime_ns, "0" * 64)
    assert host.fetch(bad) == "a.pt arrived damaged from node1 twice"
    assert not (host.here / "a.pt").exists()
    assert host.fetch(good) == ""


def test_file_damaged_once_arrives_with_the_retry(start: StartHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was damaged once on its way arrives with the next try."""
    host = start("", False)
    wanted = write(host.there, "a.pt", os.urandom(3_000_000))
    blocks, tries = sftp.blocks, iter((True, False))

    def damaged(read: Callable[[int], bytes], size_bytes: int) -> Iterator[bytes]:
        is_damaged = next(tries)
        for block in blocks(read, size_bytes):
            yield bytes(len(block)) if is_damaged else block

    monkeypatch.setattr(sftp, "blocks", damaged)
    assert host.fetch(wanted) == ""
    assert piece(host.here, "a.pt") == wanted


def test_file_is_not_replaced_by_incomplete_one(start: StartHost) -> None:
    host = start("", False, 1.0)
    write(host.there, "a.pt", os.urandom(20_000_000))
    write(host.here, "a.pt", b"before")
    host.begin(Direction.FETCH, ("a.pt",))
    until(lambda: host.copies.progress().get("key", 0) > 0)
    assert (host.here / "a.pt").read_bytes() == b"before"
    host.copies.drop("key")
    until(lambda: not host.copies.busy("node1"))
    assert [path.name for path in host.here.iterdir()] == ["a.pt"]
    assert (host.here / "a.pt").read_bytes() == b"before"


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + END_S_MAX
    while not true():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_close_ends_copy_at_once_without_leftover_process(start: StartHost, has_rsync: bool) -> None:
    """Closing ends a copy at once and leaves no process."""
    host = start("", has_rsync, 0.5)
    wanted = write(host.there, "a.pt", os.urandom(20_000_000))
    host.begin(Direction.FETCH, ("a.pt",), (wanted,))
    until(lambda: host.copies.progress().get("key", 0) > 0)
    began_s = time.monotonic()
    host.copies.close()
    assert time.monotonic() - began_s < copy_queue.CLOSE_S_MAX
    assert host.copies.copied() == []
    assert not [pid for pid in host.server.family()[1:] if b"rsync" in command(pid)]


def command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_bandwidth_limit_is_kept(start: StartHost, has_rsync: bool) -> None:
    host = start("", has_rsync, 4.0)
    wanted = write(host.there, "a.pt", os.urandom(8_000_000))
    began_s = time.monotonic()
    assert host.fetch(wanted) == ""
    assert time.monotonic() - began_s > 1.0


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_copy_resumes_after_broken_connection(start: StartHost, has_rsync: bool) -> None:
    host = start("", has_rsync, 10.0)
    wanted = write(host.there, "a.pt", os.urandom(20_000_000))
    host.begin(Direction.FETCH, ("a.pt",), (wanted,))
    until(lambda: host.copies.progress().get("key", 0) > 1_000_000)
    assert host.connection is not None
    connection, host.connection = host.connection, None
    for pid in host.server.family()[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    assert is_over(connection)
    host.connect()
    (done,) = host.wait()
    assert done.error == ""
    assert piece(host.here, "a.pt") == wanted


def test_copy_waits_for_connection_to_its_host(start: StartHost) -> None:
    host = start()
    wanted = write(host.there, "a.pt", b"data")
    connection, host.connection = host.connection, None
    host.begin(Direction.FETCH, ("a.pt",), (wanted,))
    until(lambda: host.copies.busy("node1") and not host.copies.progress())
    host.connection = connection
    (done,) = host.wait()
    assert done.error == ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, timeout=10
    )
    if made.returncode != 0:
        pytest.skip(f"needs to mount a small file system: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_full_disk_on_host_is_reported(start: StartHost, small_disk: Path, has_rsync: bool) -> None:
    host = start("", has_rsync)
    host.there = small_disk
    write(host.here, "a.pt", os.urandom(6_000_000))
    error = host.send("a.pt")
    assert "node1" in error and "space" in error
    assert list(small_disk.iterdir()) == []


def test_full_local_disk_is_reported_before_copying(start: StartHost, small_disk: Path) -> None:
    """A full local disk is reported before a byte is copied."""
    host = start()
    host.here = small_disk / "incoming"
    wanted = write(host.there, "a.pt", os.urandom(6_000_000))
    error = host.fetch(wanted)
    assert "on this machine" in error and "MB are free" in error


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_unreadable_file_on_host_is_reported(start: StartHost, has_rsync: bool) -> None:
    """A file that cannot be read on the host is reported."""
    host = start("", has_rsync)
    wanted = write(host.there, "a.pt", b"data")
    (host.there / "a.pt").unlink()
    (host.there / "a.pt").mkdir()
    assert host.fetch(wanted) != ""


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_host_is_not_sent_its_own_file_again(start: StartHost, has_rsync: bool) -> None:
    host = start("", has_rsync)
    for name in ("own.pt", "longer.pt", "later.pt"):
        write(host.here, name, b"data", SAVED_NS)
        write(host.there, name, b"data", SAVED_NS)
    write(host.there, "longer.pt", b"data and more", SAVED_NS)
    write(host.there, "later.pt", b"more", SAVED_NS + 2 * 10**9)
    write(host.here, "missing.pt", b"data", SAVED_NS)
    inode = (host.there / "own.pt").stat().st_ino
    names = ("own.pt", "longer.pt", "later.pt", "missing.pt")
    assert host.send(*names, there=names) == ""
    assert [(host.there / name).read_bytes() for name in names] == [b"data"] * 4
    assert (host.there / "own.pt").stat().st_ino == inode


def test_rsync_sends_different_bytes_of_the_same_second(start: StartHost) -> None:
    host = start()
    write(host.here, "a.pt", b"data", SAVED_NS)
    write(host.there, "a.pt", b"more", SAVED_NS + 10**8)
    assert host.send("a.pt", there=("a.pt",)) == ""
    assert (host.there / "a.pt").read_bytes() == b"data"


def test_sftp_resends_files_since_times_are_whole_seconds(
    start: StartHost,
) -> None:
    """SFTP sends a file of another copy again, since it knows only whole seconds."""
    host = start("", False)
    write(host.here, "a.pt", b"data", SAVED_NS)
    write(host.there, "a.pt", b"more", SAVED_NS)
    assert host.send("a.pt") == ""
    assert (host.there / "a.pt").read_bytes() == b"data"


@pytest.mark.parametrize("has_rsync", [True, False], ids=["rsync", "sftp"])
def test_symlink_on_host_is_copied_as_its_target(start: StartHost, has_rsync: bool) -> None:
    """A symbolic link on the host is copied as what it leads to."""
    host = start("", has_rsync)
    write(host.there, "step_1.pt", b"data")
    (host.there / "last.pt").symlink_to("step_1.pt")
    assert host.fetch(piece(host.there, "last.pt")) == ""
    assert (host.here / "last.pt").read_bytes() == b"data" and not (host.here / "last.pt").is_symlink()
