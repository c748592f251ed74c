"""The command line `orch`: one module for each kind of verb, exit codes, terminal."""

from orchestrator.cli.app import main
from orchestrator.cli.group import cli

__all__ = ["cli", "main"]
