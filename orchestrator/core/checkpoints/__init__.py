"""Checkpoints: which files form one, their formats, how completeness is proved, and the ledger of all of them."""
