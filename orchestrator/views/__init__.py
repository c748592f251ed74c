"""Views: JSON objects of the contract in, lines of text out. Pure."""
