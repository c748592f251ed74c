"""The virtual world in which the real brain is played: hosts, agents, ranks, queue, and the oracles that watch."""
