"""Outputs of ranks: checkpoints found and hashed, logs shipped."""
