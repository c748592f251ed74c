"""Environment of ranks: torchrun's contract, and the settings decided from the facts about a host. Pure."""
