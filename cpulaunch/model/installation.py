"""Where the files of cpulaunch lie that commands name."""

from __future__ import annotations

from typing import NamedTuple


class Installation(NamedTuple):
    """Absolute paths, which are the same on all hosts of a job.

    ``agent``: the file that every launcher runs, ``agent/run_agent.py``.  ``ssh``: the ssh for mpiexec.
    """

    agent: str
    ssh: str
