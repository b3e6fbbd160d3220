"""What mpiexec and ssh say when they can't start something on a host."""

from __future__ import annotations

import re

_SIGNS = (
    r"ssh: connect to host (?P<host>\S+) port \d+: (?P<why>[^\r\n]+)",
    r"ssh: Could not resolve hostname (?P<host>[^\s:]+): (?P<why>[^\r\n]+)",
    # Hydra, of which MPICH's goes on waiting; Open MPI.
    r"\[proxy:[\d:]+@(?P<host>[^\]]+)\].*execvp error on file (?P<why>[^\r\n]+)",
    r"Executable: (?P<why>\S+)\s+Node: (?P<host>\S+)",
)
_LAST_SIGNS = (r"(?P<why>Unable to run bstrap_proxy) on (?P<host>\S+)",)
"""What Intel MPI says before ssh has said why."""


def failed_start(text: str, *, ended: bool = False) -> tuple[str, str] | None:
    """The host on which a start failed, and why, if ``text`` tells of one.

    ``ended``: nothing more will be said.
    """
    for sign in (*_SIGNS, *(_LAST_SIGNS if ended else ())):
        if match := re.search(sign, text):
            return match["host"], match["why"]
    return None
