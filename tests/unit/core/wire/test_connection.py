"""Who gets through to a supervisor, and what happens to those who break the rules of the line?"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrator.core import codec
from orchestrator.core.jobdir.durable import LINE_BYTES_MAX
from orchestrator.core.wire import connection, orders, reports
from orchestrator.core.wire.connection import PeerConnection, PeerError
from orchestrator.core.wire.reports import Envelope
from orchestrator.submission.credentials import new_certificate
from orchestrator.supervisor import agent_connections
from orchestrator.supervisor import agent_connections as links_module
from orchestrator.supervisor.agent_connections import (
    HELLO_BYTES_MAX,
    AgentConnections,
    AgentDropped,
    LinkEvent,
    Wake,
)
from tests.support import jobs
from tests.support.listening import ANSWER_S_MAX, HELLO, TOKEN, Place, play


async def _is_cut_off(one: PeerConnection) -> bool:
    with pytest.raises(PeerError):
        await asyncio.wait_for(one.receive(), ANSWER_S_MAX)
    return True


@pytest.mark.parametrize(
    "change",
    [{"token": "wrong token"}, {"token": "\ud800"}, {"job": "job-2"}, {"node": "node-9"}, {"protocol": 0}],
    ids=["token", "surrogate", "job", "node", "protocol"],
)
def test_unauthenticated_client_is_disconnected_without_trace(tmp_path: Path, change: dict[str, object]) -> None:
    async def act(place: Place) -> None:
        stranger = await place.greet(dataclasses.replace(HELLO, **change))  # type: ignore[arg-type]
        assert await _is_cut_off(stranger)
        assert place.links.inbox.empty()
        assert not place.links.is_connected("node-0")

    play(tmp_path, act)


def _hello(field: str, value: str) -> bytes:
    """Return a greeting with one field put as raw JSON."""
    before = json.dumps(codec.pack(HELLO)[field])
    return codec.dumps_kind(HELLO).replace(f'"{field}":{before}', f'"{field}":{value}').encode() + b"\n"


NONSENSE = {
    "no json": b"no json\n",
    "no object": b"[]\n",
    "unknown": b'{"kind":"Ghost"}\n',
    "no kind": b'{"kind":[]}\n',
    "deep": b"[" * 100_000 + b"\n",
    "deep object": b'{"kind":' * 50_000 + b"\n",
    "no text": b"\xff\xfe{}\n",
    "number": b'{"kind":"Hello","#":Infinity}\n',
    "raw": b'{"kind":"Hello","raw":NaN}\n',
    "too long": b"x" * (LINE_BYTES_MAX + 10),
}
"""What is no message at all."""

GREETINGS = {
    "pending": _hello("pending", "Infinity"),
    "pid": _hello("pid", "-1e999"),
    "port": _hello("port", "9" * 4000),
    "running": _hello("running", "1.5"),
    "ranks": _hello("ranks", "[" * 900 + "]" * 900),
    "token": _hello("token", "[]"),
    "gpus": _hello("gpus", json.dumps(["x" * HELLO_BYTES_MAX])),
}
"""What is a greeting but for one field."""


@pytest.mark.slow
@pytest.mark.parametrize("said", [*NONSENSE.values(), *GREETINGS.values()], ids=[*NONSENSE, *GREETINGS])
def test_unauthenticated_client_sending_garbage_is_disconnected(
    tmp_path: Path, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(place: Place) -> None:
        stranger = await place.dial()
        stranger.writer.write(said)
        assert await _is_cut_off(stranger)
        assert place.links.inbox.empty()

    play(tmp_path, act)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        *NONSENSE.values(),
        *(b'{"kind":"Stopped","attempt":1,"how":"x","#":%s}\n' % seq for seq in (b"[]", b"-1", b"1.0", b"1e999")),
    ],
    ids=[*NONSENSE, "no number", "negative", "fraction", "infinite"],
)
def test_agent_sending_garbage_is_disconnected_or_passed_on(
    tmp_path: Path, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent of ours that sends garbage is disconnected, or its data is passed on."""

    async def act(place: Place) -> None:
        agent = await place.agent()
        agent.writer.write(said)
        agent.writer.close()
        words = [word async for word in _until_down(place)]
        assert all(isinstance(word, Envelope) and word.seq == 0 for word in words)

    play(tmp_path, act)
    assert not caplog.records


async def _until_down(place: Place) -> AsyncIterator[LinkEvent]:
    while (word := await place.hear()) != AgentDropped("node-0"):
        yield word


def test_silent_unauthenticated_client_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unauthenticated client that sends nothing is disconnected."""
    monkeypatch.setattr(agent_connections, "HELLO_S_MAX", 0.2)

    async def act(place: Place) -> None:
        assert await _is_cut_off(await place.dial())

    play(tmp_path, act)


def test_agent_connects_only_to_its_supervisor(tmp_path: Path) -> None:
    async def act(place: Place) -> None:
        other, _ = new_certificate()
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            await connection.dial("127.0.0.1", place.port, connection.client_context(other.decode()), ANSWER_S_MAX)

    play(tmp_path, act)


def test_kept_reports_precede_agent_up(tmp_path: Path) -> None:
    async def act(place: Place) -> None:
        agent = await place.dial()
        agent.send(dataclasses.replace(HELLO, pending=2))
        agent.send(reports.Started(1, (5,)), 3)
        agent.send(reports.Stopped(1, "asked"), 4)
        agent.send(reports.Heartbeat(1, (), 1))
        heard = [await place.hear() for _ in range(4)]
        assert [type(word) for word in heard] == [Envelope, Envelope, reports.Hello, Envelope]
        assert [word.seq for word in heard if isinstance(word, Envelope)] == [3, 4, 0]
        assert place.links.incarnation("node-0") == "boot"

    play(tmp_path, act)


def test_leaving_agent_is_reported_as_such(tmp_path: Path) -> None:
    """The end of an agent that takes its leave is reported as such."""

    async def act(place: Place) -> None:
        agent = await place.agent()
        agent.send(reports.Goodbye())
        assert await place.hear() == AgentDropped("node-0", left=True)
        assert not place.links.is_connected("node-0")

    play(tmp_path, act)


def test_new_connection_replaces_old_one_silently(tmp_path: Path) -> None:
    """A new connection replaces the old one without a report of its end."""

    async def act(place: Place) -> None:
        old = await place.agent()
        new = await place.greet(dataclasses.replace(HELLO, incarnation="second"))
        assert await _is_cut_off(old)
        up = await place.hear()
        assert isinstance(up, reports.Hello)
        assert up.incarnation == "second"
        assert place.links.send("node-0", orders.Dismiss(1))
        assert await new.receive() == ({"kind": "Dismiss", "attempt": 1}, b"")
        new.abort()
        assert await place.hear() == AgentDropped("node-0")
        assert not place.links.send("node-0", orders.Dismiss(1))
        assert place.links.inbox.empty()

    play(tmp_path, act)


def test_overlong_line_ends_connection(tmp_path: Path) -> None:

    async def act(place: Place) -> None:
        agent = await place.agent()
        agent.writer.write(b"x" * (LINE_BYTES_MAX + 10))
        assert await place.hear() == AgentDropped("node-0")

    play(tmp_path, act)


def test_raw_bytes_arrive_with_their_message(tmp_path: Path) -> None:
    async def act(place: Place) -> None:
        agent = await place.agent()
        raws = [b"", b"\n", b'{"kind":"Heartbeat"}\n', bytes(range(256)) * 1024]
        for offset, raw in enumerate(raws):
            agent.send(reports.Chunk("logs/x", offset), raw=raw)
        agent.send(reports.Stopped(1, "asked"), 1)
        heard = [await place.hear() for _ in range(5)]
        assert [word.raw for word in heard if isinstance(word, Envelope)] == [*raws, b""]
        assert [word.data for word in heard if isinstance(word, Envelope)] == [
            *({"kind": "Chunk", "path": "logs/x", "offset": offset} for offset in range(4)),
            {"kind": "Stopped", "attempt": 1, "how": "asked"},
        ]

    play(tmp_path, act)


@pytest.mark.parametrize("announced", [connection.RAW_BYTES_MAX + 1, -1, "7", 1.0, True, None])
def test_too_many_raw_bytes_end_connection(tmp_path: Path, announced: object) -> None:

    async def act(place: Place) -> None:
        agent = await place.agent()
        data = {"kind": "Chunk", "path": "logs/x", "offset": 0, connection.RAW: announced}
        agent.writer.write(json.dumps(data).encode() + b"\n")
        assert await place.hear() == AgentDropped("node-0")

    play(tmp_path, act)


def test_connection_ending_within_raw_bytes_delivers_none(tmp_path: Path) -> None:
    async def act(place: Place) -> None:
        agent = await place.agent()
        agent.writer.write(b'{"kind":"Chunk","path":"logs/x","offset":0,"raw":10}\nonly')
        agent.writer.close()
        assert await place.hear() == AgentDropped("node-0")

    play(tmp_path, act)


def test_backend_wakes_loop_from_any_thread(tmp_path: Path) -> None:
    kept: list[AgentConnections] = []

    async def act(place: Place) -> None:
        kept.append(place.links)
        thread = threading.Thread(target=place.links.wake)
        thread.start()
        assert isinstance(await place.hear(), Wake)
        thread.join(ANSWER_S_MAX)

    play(tmp_path, act)
    kept[0].wake()  # the loop is closed by now
    AgentConnections("job-1", TOKEN, ()).wake()


def test_dropped_connection_is_reported(tmp_path: Path) -> None:
    async def act(place: Place) -> None:
        agent = await place.agent()
        place.links.drop("node-0")
        place.links.drop("node-1")
        assert await place.hear() == AgentDropped("node-0")
        assert await _is_cut_off(agent)

    play(tmp_path, act)


def test_peer_that_does_not_read_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SEND_BYTES_MAX", 10_000)

    async def act(place: Place) -> None:
        agent = await place.agent()
        agent.reader._transport.pause_reading()  # type: ignore[attr-defined]
        order = orders.PrepareNode(1, None, jobs.plan(), (), {"A": "x" * 500_000})
        sent = [place.links.send("node-0", order) for _ in range(40)]
        assert sent[0]
        assert not sent[-1]

    play(tmp_path, act)


def test_taken_port_is_replaced_by_free_one(tmp_path: Path) -> None:
    async def act(place: Place) -> None:
        other = AgentConnections("job-1", TOKEN, ("node-0",))
        context = connection.server_context(tmp_path / "certificate.pem", tmp_path / "key.pem")
        port = await other.listen(context, "127.0.0.1", place.port)
        assert port != place.port
        await other.close()

    play(tmp_path, act)


def test_missing_listener_is_an_oserror() -> None:
    certificate, _ = new_certificate()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(connection.dial("127.0.0.1", port, connection.client_context(certificate.decode()), 1.0))


def test_supervisor_exit_disconnects_peers_without_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strangers: list[PeerConnection] = []
    gc.collect()  # connections of earlier tests: Python 3.10 logs their end
    caplog.clear()

    async def act(place: Place) -> None:
        for _ in range(3):
            strangers.append(await place.dial())
        assert place.links._acceptor is not None
        pending = place.links._acceptor._pending
        while len(pending) < len(strangers):  # the other side's end of TLS may take a moment longer
            await asyncio.sleep(0.001)

    play(tmp_path, act)
    assert not caplog.records


async def _greeted(place: Place) -> PeerConnection:
    """Return the agent's side of a line whose greeting has been heard."""
    one = await place.greet()
    while not any(isinstance(word, reports.Hello) for word in await place.links.receive(ANSWER_S_MAX)):
        pass
    return one


def test_heartbeats_are_batched_but_delay_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "HEARTBEATS_GATHER_S", ANSWER_S_MAX)

    async def act(place: Place) -> None:
        one = await _greeted(place)
        start_s = time.monotonic()
        for beat in range(3):
            one.send(reports.Heartbeat(0, (), beat))
        one.send(reports.Goodbye())
        words = await place.links.receive(ANSWER_S_MAX)
        assert [type(word).__name__ for word in words] == ["Envelope", "Envelope", "Envelope", "AgentDropped"]
        assert time.monotonic() - start_s < ANSWER_S_MAX, "the last word ended the wait"
        assert await place.links.receive(0.01) == []

    play(tmp_path, act)


@pytest.mark.slow
def test_lone_heartbeat_waits_no_longer_than_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "HEARTBEATS_GATHER_S", ANSWER_S_MAX)

    async def act(place: Place) -> None:
        one = await _greeted(place)
        one.send(reports.Heartbeat(0, (), 1))
        start_s = time.monotonic()
        while not await place.links.receive(0.3):
            pass
        assert time.monotonic() - start_s < ANSWER_S_MAX

    play(tmp_path, act)


@pytest.mark.slow
def test_answering_address_is_used_among_silent_ones(tmp_path: Path) -> None:
    """The address that answers is used, although others are silent."""

    async def act(place: Place) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as refusing:
            refusing.bind(("127.0.0.1", 0))
            ports = (silent.getsockname()[1], refusing.getsockname()[1], place.port)
            context = connection.client_context(place.certificate)
            one = await connection.dial_any([("127.0.0.1", port) for port in ports], context, ANSWER_S_MAX)
            assert one.writer.get_extra_info("peername")[1] == place.port
            one.abort()
            with pytest.raises(OSError):
                await connection.dial_any([("127.0.0.1", ports[1]), ("127.0.0.1", ports[1])], context, ANSWER_S_MAX)
            with pytest.raises(OSError):
                await connection.dial_any([], context, ANSWER_S_MAX)

    play(tmp_path, act)
