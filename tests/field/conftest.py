"""Fixtures for a real Slurm, as in `tests/slurm`."""

from slurm.conftest import queue, salloc, the_queue

__all__ = ["queue", "salloc", "the_queue"]
