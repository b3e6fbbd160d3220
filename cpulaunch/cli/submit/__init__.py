"""``cpulaunch submit``."""
