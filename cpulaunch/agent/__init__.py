"""The agent of a rank, which starts and watches its program.  Uses only the standard library."""
