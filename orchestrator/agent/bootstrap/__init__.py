"""Bootstrap of a job on a host: survey, launch, cleanup."""
