"""Diagnosis: crash, node_lost, hang, desync, stragglers, each in a file of its own; `diagnose` sets their order."""
