"""Tests of what users ran into: one module per kind."""
