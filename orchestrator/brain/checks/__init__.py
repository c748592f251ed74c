"""Judgement of a check: facts of all nodes in, findings out."""
