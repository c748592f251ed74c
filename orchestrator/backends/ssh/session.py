"""What does a worker need of the world? A session with its host, its turn among the others, and a clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import paramiko

from orchestrator.backends.ssh.connect.connection import Taken
from orchestrator.backends.ssh.connect.port_forward import Forward
from orchestrator.core.wire.messages import AgentConfig

TURN_S = 0.5
"""How often a host that waits for its turn sees whether it is still wanted."""


@dataclass(frozen=True, slots=True)
class AgentPresence:
    """What a host says of the agent: whether it is there, which boot of the host this is, the agent's last words."""

    alive: bool
    boot_id: str
    words: str = ""


class Session(Protocol):
    """One open connection to a host, with what is done over it. Each raises LaunchError, after bounded time."""

    def forward(self, taken: Taken) -> int:
        """Let the host listen on a port of its own, whose connections are handed to `taken`; return the port."""

    def land(self, config: AgentConfig, still_wanted: Callable[[], bool]) -> AgentPresence:
        """Bring everything there and start the agent. Raises Unwanted when it is not wanted just before its start."""

    def reach(self, config: AgentConfig) -> AgentPresence:
        """Tell the agent where it may dial, and see whether it is there."""

    def is_alive(self, answer_s_max: float) -> bool:
        """Ask the far end, and tell whether it answered."""

    def close(self) -> None:
        """Hang up."""


class ConcurrencyLimit:
    """Lets at most so many hosts at once do what costs; whoever waits goes when it is not wanted any more."""

    def __init__(self, at_once: int) -> None:
        self._free = threading.Semaphore(at_once)

    @contextmanager
    def turn(self, still_wanted: Callable[[], bool]) -> Iterator[None]:
        """Wait for a turn and have it. Raises Unwanted."""
        while not self._free.acquire(timeout=TURN_S):
            if not still_wanted():
                raise Unwanted
        try:
            if not still_wanted():
                raise Unwanted
            yield
        finally:
            self._free.release()


class Unwanted(Exception):
    """What was waited for is not wished any more."""


class Clock:
    """The time of this machine, and how to wait in it."""

    def now_s(self) -> float:
        return time.monotonic()

    def wait(self, news: threading.Condition, wait_s: float) -> None:
        """Wait for news, at most so long; its lock is held."""
        news.wait(wait_s)


@dataclass(frozen=True, slots=True)
class WorkerDependencies:
    """What all workers share: how a session is opened, how a forwarded channel is carried on, and whose turn it is."""

    open: Callable[[str], Session]
    carry: Callable[[paramiko.Channel, str, Callable[[], None]], Forward]
    launches: ConcurrencyLimit
    returns: ConcurrencyLimit
    busy: Callable[[str], bool]
    wake: Callable[[], None]
    clock: Clock = field(default_factory=Clock)
