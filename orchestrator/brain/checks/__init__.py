"""Judgement of a check: facts of all nodes in, findings out."""

__all__ = ("bisect", "finding", "network", "node", "sameness")
