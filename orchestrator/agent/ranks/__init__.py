"""Ranks of a node: how they begin, and what they tell."""
