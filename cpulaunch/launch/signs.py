"""What mpiexec and ssh say when they can't start something on a host."""

from __future__ import annotations

import re

_SIGNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"ssh: connect to host (?P<host>\S+) port \d+: (?P<why>[^\r\n]+)",
        r"ssh: Could not resolve hostname (?P<host>[^\s:]+): (?P<why>[^\r\n]+)",
        # Hydra of Intel MPI, and of Intel MPI and MPICH; Open MPI.  MPICH's goes on waiting after it.
        r"Unable to run bstrap_proxy on (?P<host>\S+) (?P<why>\([^)]*\))",
        r"\[proxy:[\d:]+@(?P<host>[^\]]+)\].*execvp error on file (?P<why>[^\r\n]+)",
        r"Executable: (?P<why>\S+)\s+Node: (?P<host>\S+)",
    )
)


def failed_start(text: str) -> tuple[str, str] | None:
    """The host on which a start failed, and why, if ``text`` tells of one."""
    found = [match for sign in _SIGNS if (match := sign.search(text))]
    if not found:
        return None
    first = min(found, key=lambda match: match.start())
    return first["host"], first["why"]
