"""A cluster in a box: real hosts with real sshd, and Slurm over them, in namespaces of this machine."""
