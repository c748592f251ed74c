"""Slurm's interface: commands and their output, job states, sbatch options, host lists, step variables."""
