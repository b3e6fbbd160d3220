"""Report of a job: one HTML file, made from the files of the job's directory."""
