"""The supervisor's port: who gets in, and who is cut off. Real sockets, no process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from orchestrator.core.wire import orders, port_acceptor
from orchestrator.core.wire.port_acceptor import Acceptor
from orchestrator.supervisor import agent_connections
from tests.support.descriptors import few_descriptors, use_up
from tests.support.listening import ANSWER_S_MAX, Place, play


async def _knock(place: Place, words: bytes = b"") -> socket.socket:
    """Return a connection that has said so much."""
    sock = socket.socket()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", place.port))
    await loop.sock_sendall(sock, words)
    return sock


async def _ended(sock: socket.socket) -> bool:
    with sock, contextlib.suppress(ConnectionError):
        wait = asyncio.get_running_loop().sock_recv(sock, 1)
        return await asyncio.wait_for(wait, ANSWER_S_MAX) == b""
    return True


def _is_open(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [b"", b"\x16", b"\x16\x03\x01", b"\x16\x03\x01\x00\x05hello", b"GET / HTTP/1.0\r\n\r\n"]
)
def test_client_without_tls_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    monkeypatch.setattr(agent_connections, "HELLO_S_MAX", 0.4)

    async def act(place: Place) -> None:
        assert await _ended(await _knock(place, words))

    play(tmp_path, act)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("words", [b"", b"\x16\x03\x01"], ids=["silent", "in TLS"])
def test_unauthenticated_clients_are_limited_but_agent_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    """The number of unauthenticated clients is limited; an agent still connects and stays connected."""
    monkeypatch.setattr(agent_connections, "UNAUTHENTICATED_MAX", 8)
    monkeypatch.setattr(agent_connections, "HELLO_S_MAX", 0.3)

    async def act(place: Place) -> None:
        first = await place.agent()
        strangers = [await _knock(place, words) for _ in range(20)]
        assert place.links.send("node-0", orders.Dismiss(1))
        assert await first.receive() == ({"kind": "Dismiss", "attempt": 1}, b"")
        second = await place.agent()  # after those before it have had their time
        assert sum(map(_is_open, strangers)) <= 8
        assert place.links.send("node-0", orders.Dismiss(1))
        assert await second.receive() == ({"kind": "Dismiss", "attempt": 1}, b"")
        for sock in strangers:
            sock.close()

    play(tmp_path, act)
    assert not caplog.records


@contextlib.asynccontextmanager
async def _accepting() -> AsyncIterator[tuple[int, list[socket.socket]]]:
    """Give the port of an acceptor, and whom it has accepted."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    async def serve(sock: socket.socket, admit: Callable[[], None]) -> None:
        accepted.append(sock)
        admit()

    acceptor = Acceptor(listener, serve, pending_max=8, pending_s_max=ANSWER_S_MAX)
    try:
        yield listener.getsockname()[1], accepted
    finally:
        acceptor.close()


@pytest.mark.slow
def test_connections_without_descriptor_wait_and_are_noted_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(port_acceptor, "RETRY_S", 0.1)

    async def act() -> None:
        async with _accepting() as (port, accepted):
            client = socket.socket()
            with client, few_descriptors(20) as used:
                use_up(used)
                client.connect(("127.0.0.1", port))
                await asyncio.sleep(0.5)
                for fd in used:
                    os.close(fd)
                used.clear()
                resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
                await _until(lambda: bool(accepted))
        assert capsys.readouterr().out == "no connection can be accepted now: Too many open files\n"

    asyncio.run(act())


async def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + ANSWER_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
