"""Ports of this node on which ranks may listen, held until they do."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from orchestrator.agent.rendezvous import probe
from orchestrator.core.host import interfaces

PORT_TRIES_MAX = 200
PORT_RANGE = range(20_000, 30_000)
"""Below the ports that Linux gives to outgoing connections (32,768 and up), so that no connection takes a job's."""


class PortError(Exception):
    """No port can be had; the text says why."""


def held_port(seed: str, fixed: int | None, ports: range = PORT_RANGE) -> socket.socket:
    """Return a socket that listens on the fixed port, or on a free one of `ports`. Raises PortError when none is free.

    The caller closes it right before another process takes the port.
    """
    if fixed is not None:
        return _held(fixed)
    chooser = random.Random(seed)
    for _ in range(PORT_TRIES_MAX):
        with contextlib.suppress(PortError):
            return _held(chooser.choice(ports))
    raise PortError(f"no free port among {PORT_TRIES_MAX} between {ports.start} and {ports.stop}")


def free_port(seed: str) -> int:
    """Return a TCP port that is free now. Raises PortError after `PORT_TRIES_MAX` tries."""
    with held_port(seed, None) as held:
        return int(held.getsockname()[1])


def _held(port: int) -> socket.socket:
    try:
        return probe.listen(port)
    except OSError as err:
        who = interfaces.holder(port) if err.errno == errno.EADDRINUSE else ""
        taken = f"is taken by {who}" if who else f"cannot be listened on: {err.strerror}"
        raise PortError(f"port {port} {taken}; choose another rendezvous.port, or none") from err
