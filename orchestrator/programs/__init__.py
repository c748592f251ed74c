"""What programs and agents read: the outcome of a wait, and the types and schemas of all JSON outputs."""
