"""`cpulaunch tune`: finds the fastest settings for a script by short runs of it."""
