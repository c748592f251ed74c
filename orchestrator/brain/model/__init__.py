"""The brain's events, decisions and facts, and the deadlines of one decision."""

__all__ = ("decisions", "events", "facts")
