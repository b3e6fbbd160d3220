"""The commands of a launcher, their JSON, and shell lines that do the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PORT_UNWATCHED = 29500
"""The default MASTER_PORT of shell lines, since no launcher runs to find a free port.  It is torch's
default."""


@dataclass(frozen=True)
class Command:
    """A process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # added to the launcher's own environment
    files: Mapping[str, str] = field(default_factory=dict)  # name → text, in the process's working directory
    host: str | None = None  # None is the launching host
    watched_env: Mapping[str, str] = field(default_factory=dict)  # added if a launcher reads the output
    when_orphaned: int = 0  # the signal to send when the launcher dies; 0 for none
    orphaned_for: float = 0  # seconds from the launcher's death to the end of this process; 0 for no limit
    leaves: str = ""  # the temporary directory that remains after SIGKILL, with {pid}; empty if none
    unset: tuple[str, ...] = ()  # variables to remove from the environment


def to_json(commands: Sequence[Command]) -> dict[str, Any]:
    """JSON data with ``commands``, and the variables that all of several commands have: ``shared_env``.

    1,000 local ranks would otherwise repeat the whole placement.
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
        # Exit with the code of the last failed rank, or with 0.
        lines.append("code=0; for job in $jobs; do wait $job || code=$?; done; exit $code")
    lines.append(")")
    return "\n".join(lines) + "\n"


def _shared_env(commands: Sequence[Command]) -> dict[str, str]:
    return dict(sorted(set(commands[0].env.items()).intersection(*(c.env.items() for c in commands))))


class Installation(NamedTuple):
    """Absolute paths of cpulaunch's scripts.  They must be the same on all hosts of a job."""

    agent: str  # run_agent.py
    ssh: str  # ssh.sh, which all launchers use instead of ssh
    spawner: str  # run_spawner.py, for the launcher ssh
