"""The queue Kubernetes: kubectl creates an MPIJob or a TrainJob, which runs ``cpulaunch run``."""
