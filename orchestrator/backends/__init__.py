"""How does an agent get onto a node? One thin module for each kind of place; no decisions here."""

from __future__ import annotations

from typing import Protocol

from orchestrator.wire.messages import AgentConfig


class LaunchError(Exception):
    """An agent could not be started: at which stage, and why."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason


class Backend(Protocol):
    """A place that agents can be started in."""

    def launch(self, config: AgentConfig) -> None:
        """Start the agent that `config` describes. Raises LaunchError when that is known at once not to work."""

    def gone(self, node: str) -> str | None:
        """Return the evidence that the node's agent is certainly no more, or None when that is not known."""
