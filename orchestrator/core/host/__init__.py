"""Facts about this machine: processes, network interfaces, GPUs."""
