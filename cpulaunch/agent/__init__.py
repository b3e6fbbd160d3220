"""A rank's agent, and how it starts the program.  Standard library only."""
