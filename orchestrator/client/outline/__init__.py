"""Outline of a job that is not started: where it would run, and the environment of its ranks with reasons."""
