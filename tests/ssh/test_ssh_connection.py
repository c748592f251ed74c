"""Connections: open only where they should, and every wait ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from paramiko.common import AUTH_FAILED, AUTH_SUCCESSFUL, OPEN_SUCCEEDED

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect import auth, dial
from orchestrator.backends.ssh.connect import connection as connections
from orchestrator.backends.ssh.connect.connection import Connection, JumpHosts
from orchestrator.backends.ssh.connect.ssh_config import Target, resolve
from orchestrator.core.observations import Retryable
from tests.support.sshd import (
    LOOPBACK,
    WAIT_S,
    Desk,
    Sshd,
    enter,
    fingerprint,
    free_port,
    is_over,
    make_key,
    needs_sshd,
    refused,
    target_of,
)

pytestmark = needs_sshd


def test_unknown_host_is_refused_with_a_working_fix(desk: Desk, jumps: JumpHosts) -> None:
    """An unknown host is refused, and the command that is named makes it known."""
    made = desk.start()
    refusal = refused(target_of(made.port), jumps, "host key")
    assert refusal.retryable is Retryable.PERMANENT
    assert fingerprint(made.host_keys[0]) in refusal.reason
    command = refusal.fix.partition(": ")[2]
    subprocess.run(["/bin/sh", "-c", command], check=True, capture_output=True, timeout=WAIT_S)
    enter(made, jumps).close()


def test_changed_host_is_refused_with_working_fixes(desk: Desk, jumps: JumpHosts, tmp_path: Path) -> None:
    """A changed host is refused, and the commands that are named let it in."""
    made = desk.start()
    old = make_key(tmp_path / "old")
    known = desk.home / ".ssh" / "known_hosts"
    known.write_text(
        made.known_hosts.replace(made.known_hosts.split()[2], old.with_suffix(".pub").read_text().split()[1])
    )
    refusal = refused(target_of(made.port), jumps, "host key")
    assert "~/.ssh/known_hosts:1" in refusal.reason
    assert refusal.retryable is Retryable.PERMANENT
    command = refusal.fix.partition(": ")[2]
    subprocess.run(["/bin/sh", "-c", command], check=True, capture_output=True, timeout=WAIT_S)
    enter(made, jumps).close()


def test_accept_new_admits_unknown_host_permanently(desk: Desk, jumps: JumpHosts) -> None:
    """accept-new lets an unknown host in once and for all."""
    made = desk.start()
    Connection.open(target_of(made.port), host_keys="accept-new", jumps=jumps).close()
    enter(made, jumps).close()


def test_connection_broken_in_login_is_a_connect_failure(
    desk: Desk, jumps: JumpHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that breaks during the login is a failure to connect."""
    made = desk.start()
    desk.know(made)

    def breaks(transport: paramiko.Transport, target: Target) -> None:
        raise OSError("the connection broke")

    monkeypatch.setattr("orchestrator.backends.ssh.connect.connection.authenticate", breaks)
    assert refused(target_of(made.port), jumps, "connect").retryable is Retryable.TRANSIENT


def test_known_key_type_is_requested(desk: Desk, jumps: JumpHosts, tmp_path: Path) -> None:
    keys = [make_key(tmp_path / kind, kind, bits=2048 if kind == "rsa" else None) for kind in ("ed25519", "rsa")]
    made = desk.start(host_keys=keys)
    (desk.home / ".ssh" / "known_hosts").write_text(made.known_hosts.splitlines()[1])
    enter(made, jumps).close()


def test_a_killed_session_is_noticed(server: Sshd, connection: Connection) -> None:
    server.cut_off()
    assert is_over(connection)
    assert not connection.is_alive(WAIT_S)


def test_forwarded_port_carries_connections_back(connection: Connection) -> None:
    arrived: list[paramiko.Channel] = []
    news = threading.Event()

    def taken(channel: paramiko.Channel) -> None:
        arrived.append(channel)
        news.set()

    port = connection.forward(taken)
    with socket.create_connection((LOOPBACK, port), WAIT_S) as line:
        line.sendall(b"hello")
        assert news.wait(WAIT_S)
        assert arrived[0].recv(5) == b"hello"
        arrived[0].sendall(b"back")
        assert line.recv(4) == b"back"


@pytest.mark.parametrize("setting", ["AllowTcpForwarding no", "DisableForwarding yes", "PermitListen none"])
def test_forbidden_forward_names_the_setting(desk: Desk, jumps: JumpHosts, setting: str) -> None:
    """A forbidden forward is reported with the sshd setting."""
    made = desk.start(setting)
    desk.know(made)
    connection = enter(made, jumps)
    with pytest.raises(LaunchError, match=r"forward: sshd on 127\.0\.0\.1 refuses remote port forwarding") as caught:
        connection.forward(lambda channel: None)
    assert setting.split()[0] in caught.value.fix
    assert "no-port-forwarding" in caught.value.fix
    assert caught.value.retryable is Retryable.PERMANENT
    assert connection.is_alive(WAIT_S)
    connection.close()


def test_requests_of_many_threads_are_not_mixed_up(connection: Connection) -> None:
    ports: list[int] = []
    threads = [
        threading.Thread(target=lambda: ports.append(connection.forward(lambda channel: None))),
        *(threading.Thread(target=connection.is_alive, args=(WAIT_S,)) for _ in range(8)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    socket.create_connection((LOOPBACK, ports[0]), WAIT_S).close()


def test_stopped_server_is_noticed_and_connection_closed(server: Sshd, connection: Connection) -> None:
    assert connection.is_alive(WAIT_S)
    family = server.family()
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert not connection.is_alive(0.2)
        assert is_over(connection)
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)


def test_refused_connection_is_temporary(jumps: JumpHosts) -> None:
    refusal = refused(target_of(free_port()), jumps, "connect")
    assert "refused" in refusal.reason
    assert refusal.retryable is Retryable.TRANSIENT


def test_unresolvable_name_is_reported(jumps: JumpHosts) -> None:
    """A name without an address is reported."""
    assert "no address is known for nosuch.invalid" in refused(resolve("nosuch.invalid"), jumps, "connect").reason


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-Stuck\r\n"], ids=["says nothing", "hangs in the key exchange"])
def test_hanging_host_times_out(jumps: JumpHosts, monkeypatch: pytest.MonkeyPatch, greeting: bytes) -> None:
    """A host that hangs is given up."""
    monkeypatch.setattr(dial, "HANDSHAKE_S_MAX", 1.0)
    with socket.create_server((LOOPBACK, 0)) as listener:
        held = threading.Thread(target=_greet, args=(listener, greeting))
        held.start()
        refusal = refused(target_of(listener.getsockname()[1]), jumps, "connect")
        held.join(WAIT_S)
    assert "takes connections, but did not greet as sshd within 1 s" in refusal.reason
    assert refusal.retryable is Retryable.TRANSIENT


def _greet(listener: socket.socket, greeting: bytes) -> None:
    """Take a connection, say the greeting, and nothing more until the other side goes."""
    line, _ = listener.accept()
    with line:
        line.settimeout(WAIT_S)
        line.sendall(greeting)
        while line.recv(4096):
            pass


class _Hanging(paramiko.ServerInterface):
    """A server that lets anyone in and opens sessions, but never comes back from one question."""

    def __init__(self, at: str, released: threading.Event) -> None:
        self._at = at
        self._released = released

    def _answer(self, question: str) -> bool:
        return question != self._at or self._released.wait(WAIT_S)

    def check_auth_none(self, username: str) -> int:
        return AUTH_SUCCESSFUL if self._answer("login") else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        return self._answer("command")

    def check_port_forward_request(self, address: str, port: int) -> int:
        return int(self._answer("forward"))


@contextlib.contextmanager
def _hanging(desk: Desk, at: str) -> Iterator[int]:
    """Serve one connection, on the port that is given."""
    released = threading.Event()
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve() -> None:
            transport = paramiko.Transport(listener.accept()[0])
            transport.add_server_key(paramiko.Ed25519Key(filename=str(desk.key)))
            transport.start_server(event=threading.Event(), server=_Hanging(at, released))
            transport.join(WAIT_S)

        serving = threading.Thread(target=serve)
        serving.start()
        yield listener.getsockname()[1]
        released.set()
        serving.join(WAIT_S)


def test_host_hanging_in_login_times_out(jumps: JumpHosts, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that hangs during the login is given up."""
    monkeypatch.setattr(auth, "AUTH_S_MAX", 0.5)
    with (
        _hanging(desk, "login") as port,
        pytest.raises(LaunchError, match=r"auth: .*did not answer within .* of logging in") as caught,
    ):
        Connection.open(target_of(port), host_keys="accept-new", jumps=jumps)
    assert caught.value.retryable is Retryable.TRANSIENT
    assert f"ssh -v -p {port}" in caught.value.fix


def test_unanswered_request_times_out(jumps: JumpHosts, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that leaves a request unanswered is given up."""
    monkeypatch.setattr(connections, "CHANNEL_S_MAX", 0.5)
    monkeypatch.setattr(connections, "FORWARD_S_MAX", 0.5)
    with _hanging(desk, "command") as port:
        opened = Connection.open(target_of(port), host_keys="accept-new", jumps=jumps)
        with pytest.raises(LaunchError, match=r"shell: .*runs no command: no answer within 0\.5 s"):
            opened.run("true")
        opened.close()
    with _hanging(desk, "forward") as port:
        opened = Connection.open(target_of(port), host_keys="accept-new", jumps=jumps)
        with pytest.raises(LaunchError, match=r"forward: .*did not answer .*: no answer within 0\.5 s"):
            opened.forward(lambda channel: None)
        opened.close()


def test_non_ssh_server_is_reported(jumps: JumpHosts) -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:

        def answer() -> None:
            line, _ = listener.accept()
            with line:
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 200)

        answering = threading.Thread(target=answer)
        answering.start()
        refusal = refused(target_of(listener.getsockname()[1]), jumps, "connect")
        answering.join(WAIT_S)
    assert "HTTP/1.1 400" in refusal.reason


@contextlib.contextmanager
def _turning_away(count: int, then: int) -> Iterator[int]:
    """Serve as an sshd that turns `count` connections away and passes the next on to the port `then`."""
    with socket.create_server((LOOPBACK, 0)) as listener, contextlib.ExitStack() as lines:

        def serve() -> None:
            for _ in range(count):
                with listener.accept()[0] as line:
                    line.sendall(b"Not allowed at this time\r\n")
            if then:
                ours, theirs = listener.accept()[0], socket.create_connection((LOOPBACK, then), WAIT_S)
                lines.callback(ours.close)
                lines.callback(theirs.close)
                for source, sink in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()

        serving = threading.Thread(target=serve)
        serving.start()
        yield listener.getsockname()[1]
        serving.join(WAIT_S)


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(65536):
            sink.sendall(block)


def test_temporarily_refusing_host_is_tried_once_more(
    desk: Desk, jumps: JumpHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REFUSED_S", 0.05)
    with _turning_away(1, desk.start().port) as port:
        Connection.open(target_of(port), host_keys="accept-new", jumps=jumps).close()


def test_persistent_refusal_is_reported_in_its_own_words(jumps: JumpHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that still refuses is reported in its own words."""
    monkeypatch.setattr(connections, "REFUSED_S", 0.05)
    with _turning_away(2, then=0) as port:
        refusal = refused(target_of(port), jumps, "connect")
    assert refusal.reason.endswith(f"port {port} turned the connection away: Not allowed at this time")
    assert "PerSourcePenalties" in refusal.fix
    assert "MaxStartups" in refusal.fix
    assert refusal.retryable is Retryable.TRANSIENT


def test_openssh_client_reaches_host_the_same_way(desk: Desk, connection: Connection) -> None:
    argv = connection.openssh()
    assert argv is not None
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes"} <= set(argv)
    done = subprocess.run([*argv, LOOPBACK, "echo in"], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout, done.returncode) == ("in\n", 0), done.stderr


def test_nothing_is_printed_on_stderr(
    desk: Desk, jumps: JumpHosts, server: Sshd, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed on standard error."""
    connection = enter(server, jumps)
    server.cut_off()
    assert is_over(connection)
    refused(target_of(free_port()), jumps, "connect")
    assert capfd.readouterr() == ("", "")


def test_many_hosts_are_connected_concurrently(server: Sshd, jumps: JumpHosts) -> None:
    said: list[bytes | None] = []

    def visit() -> None:
        connection = enter(server, jumps)
        said.append(connection.run("echo in").line(WAIT_S))
        connection.close()

    threads = [threading.Thread(target=visit) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_S)
    assert said == [b"in"] * 24
