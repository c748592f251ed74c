"""Logs and checkpoints between hosts and the job folder."""
