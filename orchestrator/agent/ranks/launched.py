"""What ranks have of the script that calls a launcher for them, and of the call; `agent.launch` makes both."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from orchestrator.core.wire import messages as m


class RankCall(Protocol):
    """A launcher call."""

    @property
    def number(self) -> int:
        """Which call of the attempt it is, from 1."""

    @property
    def cwd(self) -> Path:
        """Where the ranks start."""

    @property
    def env(self) -> dict[str, str]:
        """What the ranks are given, before their own variables."""

    def argv_of(self, local_rank: int, more: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words of a rank, with `more` behind them."""

    def env_of(self, rank: int, local_rank: int, script: m.Script) -> dict[str, str]:
        """Return the variables by which the launcher numbers a rank."""


class RankScript(Protocol):
    """The script of a node."""

    @property
    def pid(self) -> int:
        """Its shell."""

    @property
    def script(self) -> m.Script:
        """The order."""

    @property
    def is_running(self) -> bool:
        """Tell whether its shell has not been reaped."""
