"""Start a rank's program on its planned cores, in its planned environment."""
