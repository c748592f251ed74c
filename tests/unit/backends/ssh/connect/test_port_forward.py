"""Port forward: bytes arrive whole in both directions, and no host makes another wait. Over real paramiko transports."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
import pytest

from orchestrator.backends.ssh.connect.port_forward import Forward

WAIT_S_MAX = 20.0
WINDOW_BYTES = 256 * 1024
HOST_KEY = paramiko.ECDSAKey.generate()


class Door(paramiko.ServerInterface):
    """Lets everybody in."""

    def check_auth_none(self, username: str) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def check_port_forward_request(self, address: str, port: int) -> int:
        return 4711


@dataclass(slots=True)
class Host:
    """The far end of an SSH connection, whose forwarded port leads to `goal`."""

    goal: tuple[str, int]
    far: paramiko.Transport = field(init=False)
    near: paramiko.Transport = field(init=False)
    forwards: list[Forward] = field(default_factory=list)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.far, self.near = paramiko.Transport(theirs), paramiko.Transport(ours, WINDOW_BYTES)
        self.far.add_server_key(HOST_KEY)
        self.far.start_server(event=threading.Event(), server=Door())
        self.near.start_client(timeout=WAIT_S_MAX)
        self.near.auth_none("somebody")
        self.near.request_port_forward("127.0.0.1", 0, self._take)

    def _take(self, channel: paramiko.Channel, origin: object, server: object) -> None:
        self.forwards.append(Forward(channel, self.goal, self.ended.release))

    def dial(self) -> paramiko.Channel:
        """Return the end of a new forwarded connection that an agent has."""
        channel = self.far.open_forwarded_tcpip_channel(("127.0.0.1", 1), ("127.0.0.1", 4711))
        channel.settimeout(WAIT_S_MAX)
        return channel

    def wait_for_end(self) -> None:
        assert self.ended.acquire(timeout=WAIT_S_MAX), "the forward goes on"

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def supervisor() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S_MAX)
        yield server


@pytest.fixture
def host(supervisor: socket.socket) -> Iterator[Host]:
    with contextlib.closing(Host(supervisor.getsockname())) as one:
        yield one


def accept(supervisor: socket.socket) -> socket.socket:
    line, _ = supervisor.accept()
    line.settimeout(WAIT_S_MAX)
    return line


def read_all(line: socket.socket | paramiko.Channel) -> bytes:
    parts = []
    while data := line.recv(65536):
        parts.append(data)
    return b"".join(parts)


def test_bytes_arrive_unchanged_both_ways_concurrently(host: Host, supervisor: socket.socket) -> None:
    up, down = random.Random(1).randbytes(3_000_000), random.Random(2).randbytes(3_000_001)
    agent = host.dial()
    line = accept(supervisor)

    def speak() -> None:
        agent.sendall(up)
        agent.shutdown_write()

    def answer() -> None:
        line.sendall(down)
        line.shutdown(socket.SHUT_WR)

    heard: dict[str, str] = {}
    talks = [
        threading.Thread(target=speak),
        threading.Thread(target=answer),
        threading.Thread(target=lambda: heard.update(down=hashlib.sha256(read_all(agent)).hexdigest())),
        threading.Thread(target=lambda: heard.update(up=hashlib.sha256(read_all(line)).hexdigest())),
    ]
    for talk in talks:
        talk.start()
    for talk in talks:
        talk.join(WAIT_S_MAX)
    assert heard == {"up": hashlib.sha256(up).hexdigest(), "down": hashlib.sha256(down).hexdigest()}
    host.wait_for_end()


def test_agent_data_before_accept_is_not_lost(host: Host, supervisor: socket.socket) -> None:
    """Data that an agent sends before the supervisor accepts its connection is not lost."""
    agent = host.dial()
    agent.sendall(b"hello")
    agent.close()
    assert read_all(accept(supervisor)) == b"hello"
    host.wait_for_end()


@pytest.mark.slow
def test_supervisor_not_reading_blocks_the_sender(host: Host, supervisor: socket.socket) -> None:
    supervisor.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    agent = host.dial()
    line = accept(supervisor)
    agent.settimeout(0.5)
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < 100_000_000:
            sent += agent.send(b"x" * 32_768)
    agent.settimeout(WAIT_S_MAX)
    agent.shutdown_write()
    assert len(read_all(line)) == sent
    assert sent < 20_000_000, "somebody keeps what nobody reads"


def test_host_not_reading_blocks_no_other(host: Host, supervisor: socket.socket) -> None:
    stuck = host.dial()
    line = accept(supervisor)
    line.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            line.send(b"x" * 65_536)  # until not even the kernel takes more
    with contextlib.closing(Host(supervisor.getsockname())) as other:
        agent = other.dial()
        answered = accept(supervisor)
        for _ in range(10):
            agent.sendall(b"beat")
            assert answered.recv(100) == b"beat"
            answered.sendall(b"ack")
            assert agent.recv(100) == b"ack"
    stuck.sendall(b"still here")
    line.settimeout(WAIT_S_MAX)
    assert line.recv(100) == b"still here"


def test_half_closed_host_still_gets_answer(host: Host, supervisor: socket.socket) -> None:
    """A host that has sent everything still receives the answer."""
    agent = host.dial()
    line = accept(supervisor)
    agent.sendall(b"question")
    agent.shutdown_write()
    assert read_all(line) == b"question"
    line.sendall(b"answer")
    line.close()
    assert read_all(agent) == b"answer"
    host.wait_for_end()


def test_supervisor_hangup_ends_agent_connection(host: Host, supervisor: socket.socket) -> None:
    agent = host.dial()
    accept(supervisor).close()
    assert read_all(agent) == b""
    agent.close()
    host.wait_for_end()


def test_broken_ssh_ends_supervisors_connection(host: Host, supervisor: socket.socket) -> None:
    agent = host.dial()  # kept: a channel that is collected ends itself
    agent.sendall(b"last words")
    line = accept(supervisor)
    assert line.recv(100) == b"last words"
    host.near.close()
    assert read_all(line) == b""
    host.wait_for_end()


def test_port_without_listener_ends_agent_connection(host: Host, supervisor: socket.socket) -> None:
    supervisor.close()
    with contextlib.suppress(paramiko.SSHException):  # it may be closed before it was quite open
        assert read_all(host.dial()) == b""
    host.wait_for_end()


def test_forwards_leave_no_file_open(host: Host, supervisor: socket.socket) -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = files()
    for _ in range(20):
        agent = host.dial()
        accept(supervisor).close()
        read_all(agent)
        agent.close()
        host.wait_for_end()
    assert files() <= before + 2
