"""A job as a page: one HTML file that needs nothing else, and the same live in a browser."""
