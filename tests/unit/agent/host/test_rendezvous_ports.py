"""Is a port free that is said to be, and is it told who has one that is not?"""

from __future__ import annotations

import os

import pytest

from orchestrator.agent.host import rendezvous
from orchestrator.core.errors import HostError


def test_free_port_is_in_range_and_unheld() -> None:
    """A free port is in the range, and a held one is skipped."""
    with rendezvous.hold_port("seed", None) as held:
        port = held.getsockname()[1]
        assert port in rendezvous.PORT_RANGE
        assert rendezvous.free_port("seed") not in (0, port)


def test_taken_port_is_reported_with_its_process() -> None:
    with rendezvous.hold_port("seed", None) as held:
        port = held.getsockname()[1]
        with pytest.raises(HostError, match=rf"port {port} is taken by pid {os.getpid()} \(.*python"):
            rendezvous.hold_port("seed", port)
    rendezvous.hold_port("seed", port).close()
