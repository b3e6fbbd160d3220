"""Output of the ranks: log files in the job's directory, and the terminal."""
