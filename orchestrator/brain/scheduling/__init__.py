"""Where and when an attempt runs: hosts, allocations, rendezvous, checkpoints given up, restart policy, repeated failures, fence."""
