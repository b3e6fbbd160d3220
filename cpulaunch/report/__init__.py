"""Makes an HTML report from the files of a job's directory."""
