"""Journal of a job, and the record that is rebuilt from it."""
