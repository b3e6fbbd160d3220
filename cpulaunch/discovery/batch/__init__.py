"""What batch systems and Kubernetes say of a job's hosts."""
