"""How a command is run on a host of a job that is not the launching one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

SSH = str(Path(__file__).with_name("ssh.sh"))
"""ssh as cpulaunch calls it; mpiexec is told to use the same, so what works here works there."""


class Obstacle(NamedTuple):
    """Why a host wasn't reached, in the program's own words, and what to do about it.

    ``hopeless``: the launcher would start nothing there, either.
    """

    why: str
    remedy: str
    hopeless: bool = False


class Reach(Protocol):
    """A way to hosts.  ``program`` is what takes it."""

    program: str

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        """The command that has sh on ``host`` run ``line``, a single one; None where there is no way."""

    def by_hand(self, host: str) -> str:
        """What to type in order to see whether ``host`` can be reached."""

    def obstacle(self, host: str, exit_code: int, error: str) -> Obstacle | None:
        """What kept the command from ``host``, by its exit code and stderr; None where it got there."""


class NoReach:
    """All processes are on the launching host: there is nothing to reach."""

    program = ""

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        return None

    def by_hand(self, host: str) -> str:
        return ""

    def obstacle(self, host: str, exit_code: int, error: str) -> Obstacle | None:
        return None


UNRESOLVED = "Could not resolve hostname"
"""What ssh says of a name that stands for no host."""

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
    """Over ssh, without a terminal."""

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
                return Obstacle(f"ssh: {line.removeprefix('ssh: ')}", remedy.format(host=host), hopeless=True)
        last = error.splitlines()[-1].strip() if error else ""
        return Obstacle(
            f"ssh: {last or 'ended without a word'}", f"`{self.by_hand(host)}` must work without a question"
        )
