"""Find the hosts of a job in a batch system's or Kubernetes' variables and files."""
