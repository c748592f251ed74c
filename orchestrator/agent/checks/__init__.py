"""Checks of a node before a launch: facts gathered and measured, nothing started that outlives them, nothing left."""
