"""Traces of ranks, by torch's profiler, become one; and what it says.  Standard library only."""
