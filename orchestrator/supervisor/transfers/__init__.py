"""Logs and checkpoints between hosts and the job folder."""

__all__ = ("checkpoint_copies", "checkpoint_disk")
