"""Starts a rank's program as planned: on its cores, in its environment."""
