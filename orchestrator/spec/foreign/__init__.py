"""Launch lines and sbatch scripts: the launcher that a line starts, and its numbers of nodes and ranks. Pure."""
