"""Tests for problems that users ran into, with a module for each kind of problem."""
