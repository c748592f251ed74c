"""A flood at a supervisor's port, and what it leaves in memory: `python flood.py FOLDER COUNT` prints it in MiB.

FOLDER has a certificate and its key. Standard library alone, so that any Python runs it. The collector is off: in a
process with a large journal in memory it hardly ever runs in full, so nothing may rest on it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import sys
from collections import deque
from pathlib import Path

from orchestrator.core.wire import connection
from orchestrator.supervisor import agent_connections
from orchestrator.supervisor.agent_connections import AgentConnections

HELD_MAX = 200
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main(folder: Path, count: int) -> None:
    """Let the flood come, and print what it cost."""
    gc.disable()
    agent_connections.HELLO_S_MAX = 0.2
    asyncio.run(_flood(folder, count))


async def _flood(folder: Path, count: int) -> None:
    links = AgentConnections("job-1", "token", ("node-0",))
    context = connection.server_context(folder / "certificate.pem", folder / "key.pem")
    port = await links.listen(context, "127.0.0.1", 0)
    first = _client_hello()
    ways = (
        b"",
        b"x" * 100,
        b"\x16\x03\x01",
        b"\x16\x03\x01\x00\x05hello",
        first[:100],
        first,
        first + b"\x15\x03\x03\x00\x02\x02\x28",
    )
    loop = asyncio.get_running_loop()
    before = _rss_bytes()
    held: deque[socket.socket] = deque()
    for number in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        held.append(sock)
        await loop.sock_sendall(sock, ways[number % len(ways)])
        if number % 10 == 9:  # those who go through TLS and then say nothing
            held.append(await loop.run_in_executor(None, _through_tls, port))
        while len(held) > HELD_MAX:
            held.popleft().close()
    while held:
        held.popleft().close()
    print((_rss_bytes() - before) >> 20)
    await links.close()


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _client_hello() -> bytes:
    """Return the first flight of a client, as it is on the wire."""
    said = ssl.MemoryBIO()
    client = _context().wrap_bio(ssl.MemoryBIO(), said)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return said.read()


def _through_tls(port: int) -> socket.socket:
    return _context().wrap_socket(socket.create_connection(("127.0.0.1", port)))


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
