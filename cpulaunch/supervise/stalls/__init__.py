"""Whether a job makes progress, and why it does not.  Pure."""
