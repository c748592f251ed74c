"""Session with a host, its wanted and observed state, limits on concurrent work, and a clock: what a host worker uses."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import paramiko

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.connection import ChannelReceiver
from orchestrator.backends.ssh.connect.port_forward import Forward
from orchestrator.core.errors import Cancelled
from orchestrator.core.wire.agent_config import AgentConfig
from orchestrator.core.wire.bootstrap import AgentStatus

SLOT_POLL_S = 0.5
"""How often a host that waits for a slot checks whether it is still wanted."""


class Session(Protocol):
    """One open connection to a host, with what is done over it. Each method raises LaunchError, after bounded time."""

    def forward(self, taker: ChannelReceiver) -> int:
        """Let the host listen on a port of its own, whose connections go to `taker`; return the port."""

    def launch(self, config: AgentConfig, still_wanted: Callable[[], bool]) -> AgentStatus:
        """Bring everything there and start the agent. Raises Cancelled when the agent is no longer wanted just before
        its start."""

    def reach(self, config: AgentConfig) -> AgentStatus:
        """Send the agent the address to dial, and check whether it lives."""

    def is_alive(self, answer_s_max: float) -> bool:
        """Return whether the far end answers within `answer_s_max`."""

    def close(self) -> None:
        """Hang up."""


class HostGoal(enum.Enum):
    """Desired state of a host."""

    NOTHING = "nothing"
    AGENT = "agent"
    CONNECTION = "connection"


@dataclass(slots=True)
class HostWish:
    """What other threads want of the host. The lock of its worker guards it, and the observation."""

    goal: HostGoal = HostGoal.NOTHING
    config: AgentConfig | None = None
    number: int = 0  # counts wishes, so that an action knows whether it was for the latest
    idle_since_s: float = 0.0  # since when nothing is wanted
    borrowers: int = 0
    is_closing: bool = False

    def is_latest(self, number: int) -> bool:
        """Return whether an action for wish `number` is still wanted."""
        return self.number == number and not self.is_closing


@dataclass(slots=True)
class HostObservation:
    """What the thread knows of the host."""

    session: Session | None = None
    port: int = 0  # on the host's loopback, forwarded to the supervisor; 0: not forwarded
    forwards: list[Forward] = field(default_factory=list)
    boot_id: str = ""  # of the host's kernel
    failure: LaunchError | None = None  # of the last launch, until it is taken
    evidence: str | None = None  # of the agent's death, until it is taken
    reason: str = ""  # why there is no connection


class ConcurrencyLimit:
    """Limit on how many hosts do something costly at once; a host that is no longer wanted stops waiting."""

    def __init__(self, at_once: int) -> None:
        self._free = threading.Semaphore(at_once)

    @contextmanager
    def slot(self, still_wanted: Callable[[], bool]) -> Iterator[None]:
        """Wait for a slot and hold it. Raises Cancelled."""
        while not self._free.acquire(timeout=SLOT_POLL_S):
            if not still_wanted():
                raise Cancelled
        try:
            if not still_wanted():
                raise Cancelled
            yield
        finally:
            self._free.release()


class Clock:
    """The time of this machine, and how to wait in it."""

    def now_s(self) -> float:
        return time.monotonic()

    def wait(self, changed: threading.Condition, wait_s: float) -> None:
        """Wait at most `wait_s` for a change; the lock of `changed` is held."""
        changed.wait(wait_s)


@dataclass(frozen=True, slots=True)
class WorkerDependencies:
    """What all host workers share."""

    # Opens a session with a node's host. Raises LaunchError.
    open: Callable[[str], Session]
    # Forwards a channel to the supervisor's address (host:port); calls back when that ended.
    forward: Callable[[paramiko.Channel, str, Callable[[], None]], Forward]
    launches: ConcurrencyLimit
    reconnects: ConcurrencyLimit
    # Returns whether copies use a node's connection.
    busy: Callable[[str], bool]
    # Wakes the supervisor.
    wake: Callable[[], None]
    clock: Clock = field(default_factory=Clock)
