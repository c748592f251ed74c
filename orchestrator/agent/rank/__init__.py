"""A rank: its process, the hook in it, its step counter, flight recorder and error file."""
