"""Job file: its fields, their rules, and all faults at once."""
