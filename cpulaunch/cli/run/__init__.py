"""``cpulaunch run``."""
