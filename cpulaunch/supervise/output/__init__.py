"""The ranks' output, the files of a job's directory, and the terminal."""
