"""How a job comes to a host, and leaves it."""
