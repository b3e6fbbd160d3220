"""Start a job's commands; quick, as everything waits for mpiexec."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import stat
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from cpulaunch.errors import HostError
from cpulaunch.launchers.command import Command
from cpulaunch.model.hosts import LOCALHOST
from cpulaunch.plan.plan import Plan

BACKLOG = 4096
"""Connections that may wait to be accepted: all ranks of a big job come at once."""


def listen(plan: Plan) -> tuple[socket.socket, str]:
    """A listening socket on a free port of the interface that the plan's hosts reach, and its address.

    Raises HostError.
    """
    host = _own_address(plan)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as e:
        raise HostError(f"the launcher can't listen on {host}: {e.strerror or e}") from None
    port = listener.getsockname()[1]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def start(
    commands: Sequence[Command], variables: Mapping[str, str], directory: Path, ranks: int
) -> list[subprocess.Popen[bytes]]:
    """Start ``commands`` in ``directory``, each in a session of its own, with ``variables`` on top of ours.

    ``ranks`` will connect to us, and each wants a log.  HostError where a command can't be run, or one of its
    files can't be written; the commands that were started have been killed then.
    """
    _allow_files(2 * ranks + 2 * len(commands) + 256)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            _write_files(command.files, directory)
            stdin = None if number == 0 and _stdin_can_be_shared() else subprocess.DEVNULL
            processes.append(_start_one(command, variables, directory, stdin))
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        raise
    return processes


def _write_files(files: Mapping[str, str], directory: Path) -> None:
    for name, text in files.items():
        try:
            (directory / name).write_text(text)
        except OSError as e:
            raise HostError(f"{directory / name} can't be written: {e.strerror}") from None


def _start_one(
    command: Command, variables: Mapping[str, str], directory: Path, stdin: int | None
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command.argv,
            env={**os.environ, **variables, **command.env, **command.watched_env},
            cwd=directory,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(_when_orphaned, command.when_orphaned) if command.when_orphaned else None,
        )
    except OSError as e:
        raise HostError(f"{command.argv[0]} can't be run: {e.strerror}") from None


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _when_orphaned(number: int) -> None:
    """Get a signal when our parent dies: a launcher that is killed can end nobody any more."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _own_address(plan: Plan) -> str:
    """The address at which the plan's hosts reach us: that of the interface that routes to them."""
    remote = next((host.host for host in plan.hosts if host.host != LOCALHOST), None)
    if plan.here_alone or remote is None:
        return "127.0.0.1"
    if plan.egress_interface:
        return plan.egress_interface.address
    try:
        kind, _, _, _, address = socket.getaddrinfo(remote, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as s:
            s.connect(address)  # sends nothing
            own: str = s.getsockname()[0]
            return own
    except OSError as e:
        raise HostError(f"host {remote}: {e.strerror or e}", hint="check the name, and /etc/hosts") from None


def _stdin_can_be_shared() -> bool:
    """A file or a pipe goes to rank 0.  A terminal can't: its ranks are no foreground job of it."""
    try:
        return stat.S_ISREG(mode := os.fstat(0).st_mode) or stat.S_ISFIFO(mode)
    except OSError:
        return False


def _allow_files(count: int) -> None:
    """A connection and a log for each rank may take more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
