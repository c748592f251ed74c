"""Hosts that failed: remembered with reason and age, and set aside for new jobs where there are others."""
