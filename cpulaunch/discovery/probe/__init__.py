"""Probe many hosts, and check their answers."""
