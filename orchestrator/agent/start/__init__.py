"""How the ranks of a node start, as forks of a template or as new interpreters, and their processes until they have ended."""
