"""How does an agent get onto a node? One thin module for each kind of place; no decisions here."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from orchestrator.core.observations import Retryable

if TYPE_CHECKING:
    from orchestrator.core.end_cause import Cause
    from orchestrator.core.wire.messages import AgentConfig, ManifestEntry

Wake = Callable[[], None]


class LaunchError(Exception):
    """An agent could not be started: at which stage, why, and how to mend it."""

    def __init__(
        self, stage: str, reason: str, fix: str = "", trouble: Retryable = Retryable.TRANSIENT
    ) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason
        self.fix = fix
        self.trouble = trouble


class NotOursError(Exception):
    """This process is in an allocation that is not, or no more, that of the job."""


class Backend(Protocol):
    """A place that agents can be started in. No call blocks for longer than a fork takes.

    `wake` is set by the supervisor: to be called, from any thread, when there is something to tell. `copier` is there
    where hosts do not share this machine's disk, `allocation` where a queue system lends the nodes.
    """

    wake: Wake
    copier: BulkCopier | None
    allocation: Allocation | None

    def launch(self, config: AgentConfig) -> None:
        """Begin to start the agent that `config` describes. Raises LaunchError when that is known at once not to work;
        what fails later is told by `failures`."""

    def failures(self) -> list[tuple[str, LaunchError]]:
        """Return the launches, by node, that failed since the last call."""

    def agent_death(self, node: str) -> str | None:
        """Return the evidence that the node's agent is certainly no more, or None when that is not known."""

    def keep_reachable(self, config: AgentConfig) -> None:
        """Keep a way open to an agent that an earlier supervisor launched, and that may still be there."""

    def reason(self, node: str) -> str:
        """Return why there is no way to the node now; empty when there is one, or nobody knows."""

    def check_reachable(self, node: str) -> None:
        """The node's line broke, or nothing comes over it: see to the way that leads there."""

    def release(self, node: str) -> None:
        """The node's agent was dismissed: once it is gone the way to it is not needed any more."""

    def close(self) -> None:
        """Give everything back; agents stay."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The nodes will be taken away, in `left_s` from now if that is known."""

    cause: Cause
    why: str
    left_s: float | None


class Allocation(Protocol):
    """The nodes that a queue system lends to the job, this host among them, and the way back into its queue."""

    @property
    def id(self) -> str:
        """Its name, among all that the job was ever given."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, as the queue system has them."""

    def addresses(self) -> list[str]:
        """Return where the other nodes may reach this one, best first."""

    def check(self) -> None:
        """Something hints that the nodes will be taken away: find out, in the background."""

    def endings(self) -> list[Ending]:
        """Return what was learned of the end since the last call."""

    def requeue(self, avoid: Mapping[str, str]) -> str:
        """Give the nodes back and wait for others, not those to avoid; return why that cannot be. This blocks."""


class Direction(enum.Enum):
    """Which way files travel."""

    FETCH = "fetch"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class Copy:
    """Files to be copied between a node's host and this machine: `names` are relative to `there` and to `here`.

    `wanted`: what the files must be once they are here; nothing is checked of those not named.
    """

    key: str
    node: str
    direction: Direction
    there: str
    here: Path
    names: tuple[str, ...]
    wanted: tuple[ManifestEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that ended: what went wrong, empty for nothing."""

    copy: Copy
    error: str


class BulkCopier(Protocol):
    """Copies bulk in the background, a bounded number of copies at once; waits for lines that are broken."""

    def copy(self, copy: Copy) -> None:
        """Begin a copy; what lies at its goal is replaced file by file, each atomically."""

    def drop(self, key: str) -> None:
        """Give up a copy that is not wanted any more; nothing is told of it."""

    def copied(self) -> list[Copied]:
        """Return the copies that ended since the last call."""

    def progress(self) -> dict[str, int]:
        """Return how many bytes of each copy that is under way have been copied, by its key."""
