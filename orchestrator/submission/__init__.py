"""From a job file to a running job: plan, scripts, job folder, supervisor or Slurm queue."""
