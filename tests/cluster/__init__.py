"""A cluster in a box: real hosts with real sshd, in namespaces of this machine, and the tests that need them."""
