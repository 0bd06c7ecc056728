"""One program per claim; each prints a table and writes JSON."""
