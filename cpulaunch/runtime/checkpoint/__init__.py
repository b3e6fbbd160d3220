"""Checkpoints of a training: ``cpulaunch.Checkpoint``."""
