"""Ranks of a node: their start, their processes, and what is measured of them."""
