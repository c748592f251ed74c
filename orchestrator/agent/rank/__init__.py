"""A rank: the hook in it, its step counter, flight recorder and error file."""
