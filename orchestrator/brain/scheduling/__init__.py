"""Where and when an attempt runs: hosts, allocations, rendezvous, resume checkpoint, restart policy, repeated failures, fence."""
