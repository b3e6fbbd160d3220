"""Where cpulaunch is installed on this host."""

from __future__ import annotations

from pathlib import Path

import cpulaunch
from cpulaunch.launchers.reach import SSH
from cpulaunch.model.installation import Installation


def installation_here() -> Installation:
    """The paths of the cpulaunch that is running."""
    return Installation(agent=str(Path(cpulaunch.__file__).parent / "agent" / "run_agent.py"), ssh=SSH)
