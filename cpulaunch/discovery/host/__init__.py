"""Inspect this host: its CPUs, limits, libraries and networks."""
