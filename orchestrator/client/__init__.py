"""Operations on a submitted job: status, logs, post-mortem, stacks, checkpoints, collect, clean; and checks before a submit."""
