"""The hosts of a job according to batch systems and Kubernetes."""
