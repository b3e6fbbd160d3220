"""A rank's keeper, and how it starts the program.  Standard library only."""
