"""Processes of a node: the agent and its monitor, their leases and their connection to the supervisor."""

__all__ = ("agent_monitor",)
