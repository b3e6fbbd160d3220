"""Run commands on the other hosts of a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, Protocol

SSH = str(Path(__file__).with_name("ssh.sh"))
"""The script that calls ssh.  Both cpulaunch and mpiexec use it, so they reach the same hosts."""


ANY_HOST = "{host}"
"""The placeholder for a host's name in messages about several hosts."""


class Obstacle(NamedTuple):
    """Why a host can't be reached, and what to do about it.  Both texts contain ANY_HOST for its name."""

    why: str
    remedy: str
    hopeless: bool = False  # the launcher can't start ranks there


class Reach(Protocol):
    """Runs commands on hosts by means of ``program``."""

    program: str

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        """The command that runs ``line``, a single line of sh, on ``host``; None if there is none."""

    def by_hand(self, host: str) -> str:
        """A command with which users can check that ``host`` can be reached."""

    def obstacle(self, host: str, exit_code: int, error: str) -> Obstacle | None:
        """Why a command with this exit code and stderr didn't reach ``host``; None if it did."""


def without_name(host: str, line: str) -> str:
    """Replace the name of ``host`` in ``line`` by ANY_HOST."""
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", ANY_HOST, line)


class NoReach:
    """For launchers that use only the launching host."""

    program = ""

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        return None

    def by_hand(self, host: str) -> str:
        return ""

    def obstacle(self, host: str, exit_code: int, error: str) -> Obstacle | None:
        return None


UNRESOLVED = "Could not resolve hostname"
"""ssh's message about an unknown host name."""

_SSH_REMEDIES = (
    (UNRESOLVED, "is the name right?  Names come from /etc/hosts, DNS or ~/.ssh/config"),
    (
        "IDENTIFICATION HAS CHANGED",
        "if the host was reinstalled: ssh-keygen -R {host}, then ssh {host} once by hand",
    ),
    (
        "Host key verification failed",
        "ssh {host} once by hand, and compare its key; or ssh-keyscan {host} >> ~/.ssh/known_hosts",
    ),
    ("Permission denied", "ssh must not need a password: ssh-copy-id {host}"),
    ("Connection refused", "no sshd listens there: systemctl start sshd on {host}"),
    ("timed out", "is it up?  Does a firewall drop packets to its port 22?"),
    ("No route to host", "is it up, and on a network that this host reaches?"),
    ("Network is unreachable", "is it up, and on a network that this host reaches?"),
)


class Ssh:
    """Runs commands over ssh, without a terminal."""

    program = "ssh"

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        return (SSH, "-T", "-x", host, line)

    def by_hand(self, host: str) -> str:
        return f"ssh {host} true"

    def obstacle(self, host: str, exit_code: int, error: str) -> Obstacle | None:
        if exit_code != 255:
            return None
        for words, remedy in _SSH_REMEDIES:
            if words in error:
                line = next(line for line in error.splitlines() if words in line).strip(" @")
                return Obstacle(
                    f"ssh: {without_name(host, line.removeprefix('ssh: '))}", remedy, hopeless=True
                )
        last = without_name(host, error.splitlines()[-1].strip()) if error else ""
        return Obstacle(
            f"ssh: {last or 'ended without a message'}",
            f"`{self.by_hand(ANY_HOST)}` must work without a question",
        )
