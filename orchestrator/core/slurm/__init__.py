"""Slurm's own words: commands and their output, job states, sbatch options, host lists, step variables."""
