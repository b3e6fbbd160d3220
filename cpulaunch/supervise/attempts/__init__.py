"""The attempts of a job: start one, watch it, end it, and start the next."""
