"""Bootstrap of a job on a host: survey, launch, cleanup."""

__all__ = ("job_folder",)
