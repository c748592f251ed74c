"""Scheduling of attempts: hosts, allocations, rendezvous, distrusted checkpoints, restart policy, repeated failures, fence."""
