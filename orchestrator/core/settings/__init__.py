"""Settings of ranks: the facts about a host that they follow from, and the one function that decides them. Pure."""
