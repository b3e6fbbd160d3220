"""What a launcher starts, as a value and as shell lines, and the paths that it names."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PORT_UNWATCHED = 29500
"""MASTER_PORT where no launcher is there to find a free one."""


@dataclass(frozen=True)
class Command:
    """One process to start.

    ``host``: where, None for this one.  ``env`` comes on top of the launcher's own environment, and
    ``watched_env`` where a launcher reads along.  ``files`` (name → text) are written into the job's
    directory, which is where the command is run.  ``when_orphaned`` is the signal that it gets when the
    launcher dies, 0 for none; or it is ended ``orphaned_for`` seconds later, 0 for never.  ``leaves`` is the
    directory in that for temporary files that it leaves when it is killed, with its pid as ``{pid}``; empty
    where it leaves none.  ``unset`` are names of variables that it must not get.
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
    """``commands``, and ``shared_env``, what their environments have in common where there are several.

    A thousand local ranks would have a thousand times the whole placement otherwise.
    """
    shared = _shared_env(commands) if len(commands) > 1 else {}
    listed = []
    for c in commands:
        env = {name: value for name, value in {**c.env, **c.watched_env}.items() if shared.get(name) != value}
        entry = {"host": c.host, "argv": list(c.argv), "env": env, "files": dict(c.files)}
        listed.append({**entry, "unset": list(c.unset)} if c.unset else entry)
    return {"shared_env": shared, "commands": listed}


def shell(commands: Sequence[Command], master_port: int | None) -> str:
    """Lines to paste into a terminal: the same job, unwatched, on a fixed port."""
    port = PORT_UNWATCHED if master_port is None else master_port
    lines = ["(", "set -e", f"export MASTER_PORT={port}"]
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
        # The exit code of a rank that failed, if one did.
        lines.append("code=0; for job in $jobs; do wait $job || code=$?; done; exit $code")
    lines.append(")")
    return "\n".join(lines) + "\n"


def _shared_env(commands: Sequence[Command]) -> dict[str, str]:
    return dict(sorted(set(commands[0].env.items()).intersection(*(c.env.items() for c in commands))))


class Installation(NamedTuple):
    """Absolute paths, which are the same on all hosts of a job.

    ``agent``: the file that every launcher runs, ``agent/run_agent.py``.  ``ssh``: the ssh of all launchers
    that use it.  ``spawner``: the file that the launcher ssh runs on each host, ``agent/run_spawner.py``.
    """

    agent: str
    ssh: str
    spawner: str
