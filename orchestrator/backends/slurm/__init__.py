"""Backend `slurm`: agents as steps of the allocation that this process runs in. Standard library only."""
