"""Numbers of ranks: what they print, report and use."""
