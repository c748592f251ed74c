"""The supervisor's port under a flood: who gets in, who is turned away, and what that costs. Real sockets, no process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from orchestrator.core.wire import accepting
from orchestrator.core.wire import messages as m
from orchestrator.core.wire.accepting import Acceptor, Crowd
from orchestrator.supervisor import listener as port_listener
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


@pytest.mark.parametrize(
    "words", [b"", b"\x16", b"\x16\x03\x01", b"\x16\x03\x01\x00\x05hello", b"GET / HTTP/1.0\r\n\r\n"]
)
def test_whoever_does_not_go_on_with_tls_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    monkeypatch.setattr(port_listener, "FIRST_BYTE_S_MAX", 0.2)
    monkeypatch.setattr(port_listener, "HELLO_S_MAX", 0.4)

    async def act(place: Place) -> None:
        assert await _ended(await _knock(place, words))

    play(tmp_path, act)
    assert not caplog.records


@pytest.mark.parametrize("words", [b"", b"\x16\x03\x01"], ids=["silent", "in TLS"])
def test_of_a_flood_so_many_stay_and_an_agent_gets_in_and_stays_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    monkeypatch.setattr(port_listener, "SILENT_MAX", 8)
    monkeypatch.setattr(port_listener, "STRANGERS_MAX", 8)
    monkeypatch.setattr(port_listener, "TLS_MAX", 1000)
    monkeypatch.setattr(port_listener, "TLS_OF_ONE_MAX", 1000)

    async def act(place: Place) -> None:
        first = await place.agent()
        flood = [await _knock(place, words) for _ in range(100)]
        assert place.links.send("node-0", m.Dismiss())
        assert await first.receive() == ({"kind": "Dismiss"}, b"")
        second = await place.agent()  # while they stay
        assert sum(map(_is_open, flood)) <= 8
        assert place.links.send("node-0", m.Dismiss())
        assert await second.receive() == ({"kind": "Dismiss"}, b"")
        for sock in flood:
            sock.close()

    play(tmp_path, act)
    assert not caplog.records


def test_so_many_begin_tls_in_a_moment_and_not_all_from_one_address() -> None:
    pace = port_listener._Pace()
    both = [sum(pace.allows(source, 7.55) for _ in range(1000)) for source in ("a", "b", "c")]
    assert both == [
        port_listener.TLS_OF_ONE_MAX,
        port_listener.TLS_MAX - port_listener.TLS_OF_ONE_MAX,
        0,
    ]
    assert pace.allows("c", 7.65)


def test_whoever_begins_tls_too_often_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_listener, "TLS_OF_ONE_MAX", 0)
    monkeypatch.setattr(port_listener, "FIRST_BYTE_S_MAX", 0.3)

    async def act(place: Place) -> None:
        assert await _ended(await _knock(place, port_listener.TLS_HANDSHAKE))

    play(tmp_path, act)


def test_a_flood_is_told_in_one_line_with_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(port_listener, "TELL_S_MIN", 0.3)

    async def act(place: Place) -> None:
        for _ in range(30):
            assert await _ended(await _knock(place, b"GET /"))
        deadline_s = time.monotonic() + ANSWER_S_MAX
        while not (shown := capsys.readouterr().out):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        assert shown.count("\n") == 1
        assert shown.startswith(f"port {place.port}: ")
        assert shown.endswith(" no TLS), the last from 127.0.0.1\n")

    play(tmp_path, act)


@contextlib.asynccontextmanager
async def _accepting() -> AsyncIterator[tuple[int, list[socket.socket], list[str]]]:
    """Give the port of an acceptor, whom it has taken, and why it has not."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []
    refused: list[str] = []
    acceptor = Acceptor(listener, lambda sock, _: taken.append(sock), refused.append)
    try:
        yield listener.getsockname()[1], taken, refused
    finally:
        acceptor.close()
        for sock in taken:
            sock.close()


def test_without_a_descriptor_connections_wait_and_nothing_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "RETRY_S", 0.2)

    async def act() -> None:
        async with _accepting() as (port, taken, refused):
            client = socket.socket()
            with client, few_descriptors(20) as used:
                use_up(used)
                client.connect(("127.0.0.1", port))
                began_s = time.monotonic()
                await _until(lambda: len(refused) >= 3)
                assert time.monotonic() - began_s >= accepting.RETRY_S, "tried again only from time to time"
                assert os.strerror(errno.EMFILE) in refused[0]
                for fd in used:
                    os.close(fd)
                used.clear()
                resource.setrlimit(
                    resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
                )
                await _until(lambda: bool(taken))

    asyncio.run(act())


def test_some_descriptors_are_kept_for_other_work() -> None:
    async def act() -> None:
        async with _accepting() as (port, taken, refused):
            clients = [socket.socket() for _ in range(40)]
            with few_descriptors(40):
                for client in clients:
                    client.connect(("127.0.0.1", port))
                await _until(lambda: len(taken) + len(refused) == len(clients))
                assert refused
                for _ in range(8):  # a quarter of the few that are allowed here is far more
                    os.close(os.open(os.devnull, os.O_RDONLY))
            for client in clients:
                client.close()

    asyncio.run(act())


async def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + ANSWER_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


def test_for_one_too_many_the_oldest_goes_of_the_address_that_has_most() -> None:
    crowd: Crowd[str] = Crowd(3)
    assert [crowd.add(one, one[0]) for one in ("b1", "a1", "a2")] == [None, None, None]
    assert crowd.add("c1", "c") == "a1"
    assert crowd.remove("a1") == "a"
    assert crowd.add("d1", "d") == "b1"
    assert crowd.remove("b1") == "b"
    assert crowd.everyone() == ["a2", "c1", "d1"]
