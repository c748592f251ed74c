"""Processes of a node: the agent and its keeper, their leases and their line to the supervisor."""

__all__ = ("keeper",)
