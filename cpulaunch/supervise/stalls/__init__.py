"""Detect and explain stalls: times in which a job makes no progress.  Pure."""
