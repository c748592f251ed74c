"""Launch scripts on a node: run once in an attempt; where one calls a launcher, the agent starts the ranks in its place."""
