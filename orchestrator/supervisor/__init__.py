"""The supervisor of one job: receives reports, learns, decides, journals, acts."""

__all__ = ("guard", "status", "transfers")
