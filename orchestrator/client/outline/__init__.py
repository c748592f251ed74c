"""Outline of a job for `orch plan`: where it would run, and the environment of its ranks with reasons."""
