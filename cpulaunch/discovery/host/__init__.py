"""What a host is, found by looking at it: CPUs, limits, libraries, networks."""
