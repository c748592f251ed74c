"""How an agent gets onto a node: this machine, hosts over SSH, a Slurm allocation."""
