"""Merges and summarizes traces that torch's profiler made of several ranks."""
