"""Where cpulaunch itself is installed, for those who render commands and must look at nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Installation:
    """Absolute paths of the files of cpulaunch that other programs run.

    They are those of this host.  Other hosts must have cpulaunch in the same place, which preflight checks.

    ``agent`` is run_agent.py, which every launcher starts once for each rank.  ``ssh`` is the shell script by
    which mpiexec and preflight reach other hosts.
    """

    agent: str
    ssh: str
