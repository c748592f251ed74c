"""State of one host: what other threads wish of it, and what its worker's thread observes. The worker's lock guards both."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.port_forward import Forward
from orchestrator.backends.ssh.session import Session
from orchestrator.core.wire.messages import AgentConfig


class HostGoal(enum.Enum):
    """Desired state of a host."""

    NOTHING = "nothing"
    AGENT = "agent"
    CONNECTION = "connection"


@dataclass(slots=True)
class HostWish:
    """What others want of the host."""

    goal: HostGoal = HostGoal.NOTHING
    config: AgentConfig | None = None
    number: int = 0  # counts wishes, so that an action knows whether it was for the latest
    idle_since_s: float = 0.0  # since when nothing is wanted
    borrowers: int = 0
    is_closing: bool = False

    def is_latest(self, number: int) -> bool:
        """Tell whether an action for wish `number` is still wanted."""
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
