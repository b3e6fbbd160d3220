"""How a command is run on a host of a job that is not the launching one."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

SSH = str(Path(__file__).with_name("ssh.sh"))
"""ssh as cpulaunch calls it; mpiexec is told to use the same, so what works here works there."""


class Reach(Protocol):
    """A way to hosts."""

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        """The command that has sh on ``host`` run ``line``, a single one; None where there is no way."""


class NoReach:
    """All processes are on the launching host: there is nothing to reach."""

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        return None


class Ssh:
    """Over ssh, without a terminal."""

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        return (SSH, "-T", "-x", host, line)
