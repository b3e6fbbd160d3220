"""The queue Kubernetes: kubectl creates an MPIJob that calls ``cpulaunch run``."""
