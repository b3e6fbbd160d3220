"""``cpulaunch config``."""
