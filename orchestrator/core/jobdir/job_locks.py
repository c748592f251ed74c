"""Locks of a job: of its one supervisor, and of the one command that resumes it."""

from __future__ import annotations
