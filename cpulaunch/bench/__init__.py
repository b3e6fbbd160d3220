"""`cpulaunch bench`: compares collectives of ccl with gloo and with the limits of the hosts."""
