"""Hangs: all ranks of a node sampled, compared, and described."""
