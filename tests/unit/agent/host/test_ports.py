"""Is a port free that is said to be, and is it told who has one that is not?"""

from __future__ import annotations

import os

import pytest

from orchestrator.agent.host import rendezvous
from orchestrator.core.errors import HostError


def test_a_free_port_is_in_the_range_and_a_held_one_is_passed_over() -> None:
    with rendezvous.hold_port("seed", None) as held:
        port = held.getsockname()[1]
        assert port in rendezvous.PORT_RANGE
        assert rendezvous.free_port("seed") not in (0, port)


def test_a_chosen_port_that_is_taken_is_told_with_who_has_it() -> None:
    with rendezvous.hold_port("seed", None) as held:
        port = held.getsockname()[1]
        with pytest.raises(HostError, match=rf"port {port} is taken by pid {os.getpid()} \(.*python"):
            rendezvous.hold_port("seed", port)
    rendezvous.hold_port("seed", port).close()
