"""Stand-in for the module that branch `mema` brings: it is replaced by the merge."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path

from orchestrator.core.checkpoints.checkpoint import Checkpoint
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.agent_config import AgentConfig


class CheckpointMemory:
    """Interface alone."""

    def __init__(
        self,
        config: AgentConfig,
        job: JobDir,
        report: Callable[[reports.ReliableReport], None],
        note: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        self.folder = Path(config.memory_dir)
        self.addresses: tuple[str, ...] = ()
        self.is_empty = True
        self.fault = ""
        self.submit: Callable[[Callable[[], None]], concurrent.futures.Future[None]] | None = None

    def open(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        raise NotImplementedError

    def copy(self, order: orders.CopyCheckpoint) -> None:
        raise NotImplementedError

    def poll(self) -> None:
        raise NotImplementedError

    def discard(self, checkpoint: Checkpoint) -> None:
        raise NotImplementedError

    def full_text(self) -> str:
        raise NotImplementedError

    def drain(self) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def clean_up(memory_dir: str, job: str, node: str) -> None:
    raise NotImplementedError


def clean_abandoned(memory_dir: str) -> None:
    raise NotImplementedError
