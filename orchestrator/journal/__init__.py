"""The journal of a job, and what is rebuilt from it."""
