"""The supervisor of one job: receives reports, learns, decides, journals, acts."""

__all__ = ("status", "supervisor_watchdog", "transfers")
