"""What runs on the ranks of a bench."""
