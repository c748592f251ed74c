"""orch: run one PyTorch training job on many machines, and keep it running.

docs/architecture.md has the map of the rooms. `core`, `agent`, `backends`, `brain`, `journal` and `supervisor` travel to the nodes as
one zip and are standard library only, except paramiko and cryptography in `backends/ssh`, which runs on the submit machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.version import VERSION as __version__

if TYPE_CHECKING:
    from orchestrator.cli.notebook import follow, run
    from orchestrator.client.job import Job, find, submit
    from orchestrator.core.errors import ClusterError, OrchError, UserError

__all__ = ["ClusterError", "Job", "OrchError", "UserError", "__version__", "find", "follow", "run", "submit"]

_WHERE = {
    "Job": "client.job",
    "find": "client.job",
    "submit": "client.job",
    "run": "cli.notebook",
    "follow": "cli.notebook",
    "OrchError": "core.errors",
    "UserError": "core.errors",
    "ClusterError": "core.errors",
}


def __dir__() -> list[str]:
    """List the API, for completion in a notebook."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Load what a script asks for when it asks: nodes and quick verbs need none of it."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
