"""Code that runs in the program's process before the user's code."""
