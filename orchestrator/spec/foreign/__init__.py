"""Lines, scripts and job files of other launchers: what starts them, and what they say of a job's size. Pure."""
