"""Interface of a backend, which starts agents on nodes, and its value types. Backends make no decisions."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from orchestrator.core.observations import Retryable
from orchestrator.core.status_types import AllocationEndCause

if TYPE_CHECKING:
    from orchestrator.core.checkpoints.checkpoint import CheckpointFile
    from orchestrator.core.wire.agent_config import AgentConfig

Wake = Callable[[], None]


class LaunchError(Exception):
    """Failed launch of an agent: at which stage, why, and how to fix it."""

    def __init__(self, stage: str, reason: str, fix: str = "", trouble: Retryable = Retryable.TRANSIENT) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason
        self.fix = fix
        self.retryable = trouble


class Backend:
    """A place that agents can be started in. No call blocks for longer than a fork takes.

    A backend subclasses it and states what it does otherwise: by default agents are always reachable, and nothing is to be
    learned or given back.
    """

    # Set by the supervisor; the backend calls it, from any thread, when there is something to collect.
    wake: Wake
    # Set where hosts do not share this machine's disk.
    copier: BulkCopier | None = None
    # Set where a queue system lends the nodes.
    allocation: Allocation | None = None

    def launch(self, config: AgentConfig) -> None:
        """Begin to start the agent that `config` describes. Raises LaunchError when it fails at once; `failures`
        returns later failures."""
        raise NotImplementedError

    def failures(self) -> list[tuple[str, LaunchError]]:
        """Return the launches, by node, that failed since the last call."""
        return []

    def agent_death(self, node: str) -> str | None:
        """Return the evidence that the node's agent is certainly dead, or None when that is not known."""
        return None

    def keep_reachable(self, config: AgentConfig) -> None:
        """Keep a connection open to an agent that an earlier supervisor launched, and that may still be there."""

    def reason(self, node: str) -> str:
        """Return why there is no connection to the node now; empty when there is one, or the reason is not known."""
        return ""

    def check_reachable(self, node: str) -> None:
        """Check the connection to the node: its agent's line broke, or nothing comes over it."""

    def release(self, node: str) -> None:
        """Give up the connection to the node, whose agent was dismissed, once the agent has ended."""

    def close(self) -> None:
        """Release all resources; agents keep running."""


@dataclass(frozen=True, slots=True)
class AllocationEnd:
    """The nodes will be taken away, in `left_s` from now if that is known."""

    cause: AllocationEndCause
    why: str
    left_s: float | None


class Allocation(Protocol):
    """The nodes that a queue system lends to the job, this host among them, and the way back into its queue."""

    @property
    def id(self) -> str:
        """Its name, unique among all allocations of the job."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, as the queue system has them."""

    def addresses(self) -> list[str]:
        """Return where the other nodes may reach this one, best first."""

    def check(self) -> None:
        """Find out in the background whether the nodes will be taken away: something hints at it."""

    def endings(self) -> list[AllocationEnd]:
        """Return what was learned of the end since the last call."""

    def requeue(self, avoid: Mapping[str, str]) -> str:
        """Give the nodes back and wait for others, without those to avoid; return why that failed, empty when it did
        not. This blocks."""


class Direction(enum.Enum):
    """Direction of a copy."""

    FETCH = "fetch"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class Copy:
    """Files to be copied between a node's host and this machine."""

    key: str
    node: str
    direction: Direction
    remote_dir: str
    local_dir: Path
    names: tuple[str, ...]  # relative to both folders
    expected: tuple[CheckpointFile, ...] = ()
    written_by_host: tuple[str, ...] = ()  # of sent files: those that the host has written itself


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A copy that ended; `error` is empty when it succeeded."""

    copy: Copy
    error: str


class BulkCopier(Protocol):
    """Copies large files in the background, a bounded number of copies at once; waits while connections are broken."""

    def copy(self, copy: Copy) -> None:
        """Begin a copy, which replaces its target files one by one, each atomically."""

    def drop(self, key: str) -> None:
        """Give up a copy that is no longer wanted; `copied` does not return it."""

    def copied(self) -> list[CopyResult]:
        """Return the copies that ended since the last call."""

    def progress(self) -> dict[str, int]:
        """Return how many bytes of each copy under way have been copied, by key."""
