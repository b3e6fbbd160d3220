"""Run a command on a host of a job other than the launching host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, Protocol

SSH = str(Path(__file__).with_name("ssh.sh"))
"""The script by which cpulaunch calls ssh.  mpiexec uses the same one, so both reach the same hosts."""


ANY_HOST = "{host}"
"""Stands for a host's name in texts that may be about several hosts."""


class Obstacle(NamedTuple):
    """Why a host wasn't reached, in the program's own words, and what to do about it.

    Both texts have ANY_HOST for the host's name.  ``hopeless``: the launcher can't start anything there.
    """

    why: str
    remedy: str
    hopeless: bool = False


class Reach(Protocol):
    """A way to run commands on hosts.  ``program`` is the name of the program that does it."""

    program: str

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        """The command that runs ``line``, a single line of sh, on ``host``; None if it can't be reached."""

    def by_hand(self, host: str) -> str:
        """A command for the user to check whether ``host`` can be reached."""

    def obstacle(self, host: str, exit_code: int, error: str) -> Obstacle | None:
        """The reason, from exit code and stderr, why a command didn't reach ``host``; None if it did."""


def without_name(host: str, line: str) -> str:
    """Return another program's ``line`` about ``host`` with ANY_HOST for the host's name."""
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", ANY_HOST, line)


class NoReach:
    """For launchers whose processes are all on the launching host."""

    program = ""

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        return None

    def by_hand(self, host: str) -> str:
        return ""

    def obstacle(self, host: str, exit_code: int, error: str) -> Obstacle | None:
        return None


UNRESOLVED = "Could not resolve hostname"
"""The message of ssh for an unknown host name."""

_SSH_SAYS = (
    (UNRESOLVED, "is the name right?  Names come from /etc/hosts, DNS or ~/.ssh/config"),
    (
        "IDENTIFICATION HAS CHANGED",
        "if the host was installed anew: ssh-keygen -R {host}, then ssh {host} once by hand",
    ),
    (
        "Host key verification failed",
        "ssh {host} once by hand, and compare its key; or ssh-keyscan {host} >> ~/.ssh/known_hosts",
    ),
    ("Permission denied", "ssh must not need a password: ssh-copy-id {host}"),
    ("Connection refused", "no sshd listens there: systemctl start sshd on {host}"),
    ("timed out", "is it up?  Or does a firewall drop the packets to its port 22?"),
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
        for words, remedy in _SSH_SAYS:
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
