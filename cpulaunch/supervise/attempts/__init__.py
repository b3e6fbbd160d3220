"""The attempts of a job: starting one, watching it, ending it, and starting the next."""
