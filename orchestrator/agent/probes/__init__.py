"""Probes of a process, one source of facts each: stacks, kernel waits, open files, GPU use, source lines."""
