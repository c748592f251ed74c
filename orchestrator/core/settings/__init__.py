"""Settings of ranks: the one function that decides them from the facts about a host. Pure."""
