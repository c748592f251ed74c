"""What can be done with a submitted job: status, logs, post-mortem, stacks, checkpoints, checks."""
