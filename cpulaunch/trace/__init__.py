"""Merge ranks' traces by torch's profiler, and summarize them.  Standard library only."""
