"""The program of a bench's ranks."""
