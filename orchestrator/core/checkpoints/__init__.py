"""Saves: what ranks write together, its formats, its proof, and the ledger that knows them all."""
