"""Backend `slurm`: agents as steps of the allocation that this very process lives in. Standard library only."""
