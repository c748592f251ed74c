"""What ranks write: checkpoints found and hashed, logs shipped."""
