"""What only a GPU can show: whole jobs on one NVIDIA GPU, in less than five minutes. `make test-gpu` runs them.

`ORCH_GPU_TESTS=cpu make test-gpu` runs those that make sense without one on CPUs, to see that the tests themselves are well.
"""
