"""Report of a job: a self-contained HTML page, and a live server for all jobs of a job home."""
