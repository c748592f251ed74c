"""The command line `orch`: one module for each kind of verb, exit codes, terminal."""

from orchestrator.cli.app import cli, main

__all__ = ["cli", "main"]
