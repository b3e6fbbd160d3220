"""Observers of a rank's program, which don't change what it computes."""
