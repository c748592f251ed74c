"""Remote commands and files, whatever a shell prints; every wait ends."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.connection import Connection, JumpHosts
from orchestrator.backends.ssh.connect.remote_command import ERRORS_BYTES_MAX, LINE_BYTES_MAX, RemoteCommand
from tests.support.sshd import WAIT_S, Desk, Sshd, enter, is_over, needs_sshd

pytestmark = needs_sshd

NOISY = "ForceCommand echo 'Welcome to the lab!'; echo 'mind the gap' >&2; eval \"$SSH_ORIGINAL_COMMAND\""


def test_command_has_input_lines_errors_and_code(connection: Connection) -> None:
    """A command gets its input and returns its lines, its errors and its exit code."""
    remote = connection.run("cat; echo tail; printf half; echo oops >&2; exit 7")
    remote.send(b"one\ntwo\n")
    remote.end_input()
    lines = []
    while (line := remote.line(WAIT_S)) is not None:
        lines.append(line)
    assert lines == [b"one", b"two", b"tail", b"half"]
    assert remote.exit_code(WAIT_S) == 7
    assert remote.errors == "oops\n"
    assert remote.line(WAIT_S) is None
    remote.close()


def test_silent_command_times_out(connection: Connection) -> None:
    """A silent command is not waited for longer than its time limit."""
    remote = connection.run("cat")
    with pytest.raises(TimeoutError):
        remote.line(0.05)
    with pytest.raises(TimeoutError):
        remote.exit_code(0.05)
    remote.send(b"late\n")
    assert remote.line(WAIT_S) == b"late"
    remote.close()


def test_a_killed_command_has_no_code(connection: Connection) -> None:
    remote = connection.run("kill -9 $$")
    assert remote.line(WAIT_S) is None
    assert remote.exit_code(WAIT_S) is None


def test_large_streams_both_ways_use_bounded_memory(connection: Connection) -> None:
    data = os.urandom(1 << 20) * 24
    remote = connection.run("cat")
    got = bytearray()

    def read() -> None:
        while more := remote.read(1 << 20, WAIT_S):
            got.extend(more)

    reader = threading.Thread(target=read)
    reader.start()
    remote.send(data)
    remote.end_input()
    reader.join(WAIT_S)
    assert bytes(got) == data
    assert remote.exit_code(WAIT_S) == 0


def test_error_flood_keeps_tail_without_blocking_output(connection: Connection) -> None:
    remote = connection.run("head -c 20000000 /dev/zero | tr '\\0' e >&2; echo the end >&2; echo done")
    assert remote.line(WAIT_S) == b"done"
    assert remote.exit_code(WAIT_S) == 0
    assert remote.errors.endswith("the end\n")
    assert len(remote.errors) <= ERRORS_BYTES_MAX


def test_line_without_end_is_split(connection: Connection) -> None:
    """A line without an end is delivered in parts."""
    remote = connection.run(f"head -c {LINE_BYTES_MAX + 10} /dev/zero; echo; echo next")
    assert len(remote.line(WAIT_S) or b"") == LINE_BYTES_MAX
    assert remote.line(WAIT_S) == bytes(10)
    assert remote.line(WAIT_S) == b"next"


def test_rekeying_mid_stream_changes_nothing(desk: Desk, jumps: JumpHosts) -> None:
    """New session keys in the middle of a stream change nothing."""
    server = desk.start("RekeyLimit 100K")
    desk.know(server)
    connection = enter(server, jumps)
    said: list[int] = []

    def work() -> None:
        for _ in range(8):
            remote = connection.run("cat; head -c 70000 /dev/zero")
            remote.send(bytes(50_000))
            remote.end_input()
            size_bytes = 0
            while more := remote.read(1 << 20, WAIT_S):
                size_bytes += len(more)
            said.append(size_bytes)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert said == [120_000] * 32
    connection.close()


def test_write_to_ended_command_is_reported(connection: Connection) -> None:
    remote = connection.run("true")
    assert remote.exit_code(WAIT_S) == 0
    with pytest.raises(BrokenPipeError):
        remote.send(b"x" * 100_000_000)


def test_a_closed_connection_ends_every_wait(connection: Connection) -> None:
    remote = connection.run("sleep 1000")
    closer = threading.Timer(0.1, connection.close)
    closer.start()
    assert remote.line(WAIT_S) is None
    assert remote.exit_code(WAIT_S) is None
    assert is_over(connection)
    with pytest.raises(LaunchError, match="shell: "):
        connection.run("true")


def test_writer_blocked_by_stopped_server_is_freed(server: Sshd, connection: Connection) -> None:
    """A writer that a stopped server blocks is freed by the liveness request."""
    remote = connection.run("cat > /dev/null")
    remote.send(b"x")
    ended: list[str] = []
    family = server.family()
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    try:
        writer = threading.Thread(target=_write_until_it_breaks, args=(remote, ended))
        writer.start()
        assert not connection.is_alive(0.5)
        writer.join(WAIT_S)
        assert ended == ["BrokenPipeError"]
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)


def _write_until_it_breaks(remote: RemoteCommand, ended: list[str]) -> None:
    try:
        remote.send(bytes(200 << 20))
    except OSError as err:
        ended.append(type(err).__name__)


def test_files_are_copied(connection: Connection, tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"weights" * 100_000)
    with connection.sftp() as files:
        files.put(str(tmp_path / "here"), str(tmp_path / "there"))
    assert (tmp_path / "there").read_bytes() == b"weights" * 100_000


def test_noisy_shell_breaks_neither_commands_nor_files(desk: Desk, jumps: JumpHosts, tmp_path: Path) -> None:
    made = desk.start(NOISY)
    desk.know(made)
    connection = enter(made, jumps)
    remote = connection.run("echo mark")
    assert [remote.line(WAIT_S), remote.line(WAIT_S)] == [b"Welcome to the lab!", b"mark"]
    (tmp_path / "here").write_text("weights")
    with connection.sftp() as files:
        files.get(str(tmp_path / "here"), str(tmp_path / "there"))
    assert (tmp_path / "there").read_text() == "weights"
    connection.close()


def test_a_host_without_sftp_is_named(desk: Desk, jumps: JumpHosts) -> None:
    made = desk.start("ForceCommand echo no files today")
    desk.know(made)
    connection = enter(made, jumps)
    with pytest.raises(LaunchError, match=r"copy: 127.0.0.1 has no sftp-server .*no files today") as caught:
        connection.sftp()
    assert "rsync" in caught.value.fix
    connection.close()
