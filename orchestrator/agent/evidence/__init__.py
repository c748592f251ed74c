"""Evidence of a hang: all ranks of a node sampled, compared, and described."""
