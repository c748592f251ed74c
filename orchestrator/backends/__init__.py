"""Launch of agents on nodes: this machine, hosts over SSH, a Slurm allocation."""
