"""Measurements of what the design promises, as ratios in one run: `make bench`."""
