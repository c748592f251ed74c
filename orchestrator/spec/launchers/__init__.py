"""Launch lines of other launchers (torchrun, accelerate, deepspeed, fabric, srun) as settings of a job file. Pure."""
