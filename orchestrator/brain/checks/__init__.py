"""Judgement of a check: facts of all nodes in, findings out."""

__all__ = ("finding", "network", "node", "sameness")
