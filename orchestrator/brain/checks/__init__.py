"""Judgement of a check: facts of all nodes in, findings out."""

__all__ = ("burn_in", "consistency", "finding", "network", "node")
