"""Do nodes find each other, and nobody else, at the addresses they give?"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest

from orchestrator.agent.host import rendezvous as rendezvous_probe
from orchestrator.agent.host.rendezvous import Listener, listen, probe
from orchestrator.core.host import interfaces
from orchestrator.core.observations import Address, ReachableAddress

TOKEN = "of the job"


def _probe(*targets: str, port: int, token: str = TOKEN, attempt: int = 3) -> tuple[object, object]:
    return asyncio.run(_ask(*targets, port=port, token=token, attempt=attempt))


async def _ask(*targets: str, port: int, token: str = TOKEN, attempt: int = 3) -> tuple[object, object]:
    return await probe(targets, port, token, attempt)


@contextlib.contextmanager
def _listening() -> Iterator[tuple[Listener, int]]:
    """Needs a running loop."""
    sock = listen(0)
    listener = Listener(sock, TOKEN, 3)
    try:
        yield listener, sock.getsockname()[1]
    finally:
        listener.close()


def test_node_is_reached_at_all_addresses_concurrently() -> None:
    """The right node is reached at each of its addresses at once."""

    async def act() -> None:
        with _listening() as (_, port):
            found = await _ask("127.0.0.1", "127.0.0.2", port=port)
            assert found == ((ReachableAddress("127.0.0.1", ""), ReachableAddress("127.0.0.2", "")), ())

    asyncio.run(act())


@pytest.mark.parametrize("change", [{"token": "of another"}, {"attempt": 4}], ids=["job", "attempt"])
def test_listener_of_other_job_is_another_machine(change: dict[str, str]) -> None:
    """The listener of another job or attempt counts as another machine."""

    async def act() -> None:
        with _listening() as (_, port):
            found = await _ask("127.0.0.1", port=port, **change)  # type: ignore[arg-type]
            assert found == ((), (f"127.0.0.1:{port} from 127.0.0.1 another machine answered",))

    asyncio.run(act())


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.2\r\n" + b"x" * 40, b""], ids=["talks", "closes"])
def test_unknown_listener_is_another_machine(words: bytes) -> None:
    """An unknown program on the port counts as another machine."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        writer.close()

    async def act() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await _ask("127.0.0.1", port=port) == (
            (),
            (f"127.0.0.1:{port} from 127.0.0.1 another machine answered",),
        )
        server.close()

    asyncio.run(act())


def test_silent_listener_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that sends nothing is given up in time."""
    monkeypatch.setattr(rendezvous_probe, "PROBE_S_MAX", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        _, missed = _probe("127.0.0.1", port=port)
        assert missed == (
            f"127.0.0.1:{port} from 127.0.0.1 accepted the connection and sent nothing for 0.2 s (another machine?)",
        )


def test_a_full_queue_times_out_like_a_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_probe, "PROBE_S_MAX", 0.2)
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        _, missed = _probe("127.0.0.1", port=port)
        assert missed == (f"127.0.0.1:{port} from 127.0.0.1 timed out after 0.2 s (firewall?)",)


def test_closed_port_is_refused_and_missing_route_reported() -> None:
    """A port without a listener is refused, and an address without a route has no route."""
    with listen(0) as sock:
        port = sock.getsockname()[1]
    reached, missed = _probe("127.0.0.1", "255.255.255.255", port=port)
    assert reached == ()
    assert isinstance(missed, tuple)
    assert missed[0] == f"127.0.0.1:{port} from 127.0.0.1 refused"
    assert missed[1].startswith(f"255.255.255.255:{port} from ") and missed[1].endswith(" no route")


def test_port_is_free_after_listener_closes() -> None:
    """The port is free for the ranks as soon as the listener is closed."""

    async def act() -> None:
        with _listening() as (listener, port):
            assert (await _ask("127.0.0.1", port=port))[1] == ()
            lingering = socket.create_connection(("127.0.0.1", port), 5.0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            listener.close()
            with listen(port):  # as torch's store does, with SO_REUSEADDR
                pass
            lingering.close()

    asyncio.run(act())


def test_silent_client_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that only connects is disconnected."""
    monkeypatch.setattr(rendezvous_probe, "ANSWER_S_MAX", 0.1)

    async def act() -> None:
        with _listening() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            started_s = time.monotonic()
            assert await asyncio.wait_for(reader.read(), 10.0) == b""
            assert time.monotonic() - started_s < 5.0
            writer.close()

    asyncio.run(act())


def test_excess_connections_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections above the limit wait for their turn."""
    monkeypatch.setattr(rendezvous_probe, "PROBERS_MAX", 1)
    monkeypatch.setattr(rendezvous_probe, "ANSWER_S_MAX", 0.3)

    async def act() -> None:
        with _listening() as (_, port):
            _, silent = await asyncio.open_connection("127.0.0.1", port)
            assert await _ask("127.0.0.1", port=port) == ((ReachableAddress("127.0.0.1", ""),), ())
            silent.close()

    asyncio.run(act())


def test_addresses_are_of_active_non_loopback_interfaces() -> None:
    found = interfaces.list_addresses()
    names = {name for _, name in socket.if_nameindex()}
    assert all(one.interface.partition(":")[0] in names for one in found)
    assert not [one for one in found if one.ip.startswith("127.") or one.interface == "lo"]
    assert len(set(found)) == len(found)


def test_container_interfaces_come_last() -> None:
    given = [
        Address("172.17.0.1", "docker0"),
        Address("172.18.0.1", "br-0f1e2d"),
        Address("192.168.122.1", "virbr0"),
        Address("169.254.3.4", "eth9"),
        Address("10.8.0.2", "tun0"),
        Address("10.244.0.1", "cni0"),
        Address("10.0.0.7", "bond0"),
        Address("10.0.1.7", "br0"),
    ]
    assert [one.interface for one in sorted(given, key=interfaces._rank)][:2] == ["bond0", "br0"]


def test_listening_process_is_named_with_command() -> None:
    with listen(0) as sock:
        port = sock.getsockname()[1]
        assert interfaces.describe_listener(port).startswith(f"pid {os.getpid()} (")
    assert interfaces.describe_listener(port) == ""
