"""A check of the job's hosts: visits to all of them at once, the questions asked there, and what follows."""
