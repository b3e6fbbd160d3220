"""The commands of a launcher, as values, as JSON and as shell lines, and the paths that they use."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PORT_UNWATCHED = 29500
"""MASTER_PORT if the user sets no port, and no launcher runs to find a free one.  It is torch's default."""


@dataclass(frozen=True)
class Command:
    """One process to start on ``host``, or on this host if ``host`` is None.

    ``env`` is added to the launcher's own environment, and ``watched_env`` only if a launcher reads the
    output.  ``unset`` are variables that the process must not get.  ``files`` (name → text) are written into
    the job's directory, in which the process runs.

    When the launcher dies, the process gets the signal ``when_orphaned``, or none if that is 0.  It is ended
    ``orphaned_for`` seconds after the launcher's death, or never if that is 0.  ``leaves`` names the
    temporary directory that a killed process leaves behind, with ``{pid}`` for the process id; it is empty if
    there is none.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    watched_env: Mapping[str, str] = field(default_factory=dict)
    when_orphaned: int = 0
    orphaned_for: float = 0
    leaves: str = ""
    unset: tuple[str, ...] = ()


def to_json(commands: Sequence[Command]) -> dict[str, Any]:
    """JSON data with ``commands``, and ``shared_env``, the variables that all of several commands share.

    Without ``shared_env``, the commands of 1,000 local ranks would repeat the whole placement 1,000 times.
    """
    shared = _shared_env(commands) if len(commands) > 1 else {}
    listed = []
    for c in commands:
        env = {name: value for name, value in {**c.env, **c.watched_env}.items() if shared.get(name) != value}
        entry = {"host": c.host, "argv": list(c.argv), "env": env, "files": dict(c.files)}
        listed.append({**entry, "unset": list(c.unset)} if c.unset else entry)
    return {"shared_env": shared, "commands": listed}


def shell(commands: Sequence[Command], master_port: int) -> str:
    """Shell lines that run the same job without a launcher, to paste into a terminal."""
    lines = ["(", "set -e", f"export MASTER_PORT={master_port}"]
    shared = _shared_env(commands)
    files = {name: text for command in commands for name, text in command.files.items()}
    if files:
        lines += ["directory=$(mktemp -d)", "trap 'rm -r \"$directory\"' EXIT", 'cd "$directory"']
    for name, text in files.items():
        lines += [f"cat > {shlex.quote(name)} <<'END OF FILE'", text.rstrip("\n"), "END OF FILE"]
    lines += [f"export {name}={shlex.quote(shared[name])}" for name in sorted(shared)]
    if unset := dict.fromkeys(name for command in commands for name in command.unset):
        lines.append(f"unset {' '.join(unset)}")
    background = ""
    if len(commands) > 1:
        lines.append("jobs=")
        background = ' & jobs="$jobs $!"'
    for command in commands:
        own = [f"{k}={shlex.quote(v)}" for k, v in sorted(command.env.items()) if shared.get(k) != v]
        lines.append(
            " ".join(["env", *own, shlex.join(command.argv)] if own else [shlex.join(command.argv)])
            + background
        )
    if background:
        # Exit with the code of the last rank that failed, or with 0.
        lines.append("code=0; for job in $jobs; do wait $job || code=$?; done; exit $code")
    lines.append(")")
    return "\n".join(lines) + "\n"


def _shared_env(commands: Sequence[Command]) -> dict[str, str]:
    return dict(sorted(set(commands[0].env.items()).intersection(*(c.env.items() for c in commands))))


class Installation(NamedTuple):
    """Absolute paths of cpulaunch's scripts, which must be the same on all hosts of a job.

    ``agent`` is ``agent/run_agent.py``, which every launcher runs.  ``ssh`` is the ssh of all launchers that
    use ssh.  ``spawner`` is ``agent/run_spawner.py``, which the launcher ssh runs on each host.
    """

    agent: str
    ssh: str
    spawner: str
