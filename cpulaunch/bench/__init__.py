"""`cpulaunch bench`: collectives of ccl beside gloo on the user's hosts, and the limits there."""
