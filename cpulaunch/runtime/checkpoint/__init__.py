"""Checkpoints of a training: ``cpulaunch.Checkpoint``, in ``checkpoint.checkpoint``."""
