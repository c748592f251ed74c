"""The job file: its fields, their rules, and every fault at once."""
