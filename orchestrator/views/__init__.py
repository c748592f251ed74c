"""How results look: JSON objects in, lines out. Pure."""
