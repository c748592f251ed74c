"""Metrics of ranks: printed, reported, and measured."""
