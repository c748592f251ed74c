"""The host of a node: prepared for an attempt, and checked before a job."""

__all__ = ("check_steps", "program", "program_probe", "rendezvous", "resources", "setup_script")
