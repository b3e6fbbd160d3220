"""Probe hosts in parallel, and check their answers."""
