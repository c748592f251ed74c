"""Agent of a node: starts ranks, watches them, reports to the supervisor. Standard library only."""

__all__ = ("bootstrap", "host", "process")
