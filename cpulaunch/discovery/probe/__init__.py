"""Asking many hosts about themselves, and judging what they answer."""
