"""Logs and checkpoints between hosts and the job folder."""

__all__ = ("save_copies", "save_disk")
