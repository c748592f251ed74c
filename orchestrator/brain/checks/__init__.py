"""Judgement of a check: facts of all nodes in, findings out."""

__all__ = ("consistency", "finding", "network", "node")
