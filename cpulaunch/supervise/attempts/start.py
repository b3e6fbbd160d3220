"""Start a job's commands.  This must be fast, as all ranks wait for mpiexec."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from cpulaunch import variables
from cpulaunch.discovery.host.master_port import first_free
from cpulaunch.errors import HostError
from cpulaunch.launchers.command import Command
from cpulaunch.model.network import is_loopback
from cpulaunch.plan.plan import Plan
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.wording import cannot_run

BACKLOG = 4096
"""Connections that may wait to be accepted, as all ranks of a big job connect at once."""

AT_ONCE = 32
"""The number of agents that start at the same time; on hosts with more than 16 cores, it is two per core.

More agents would only slow down each other and the launcher.
"""

MAX_STRANGERS = 256
"""Connections that may be open besides one for each rank.  Beyond that, a stranger is disconnected."""

MAX_STRANGERS_HERE = 16
"""The limit on a Unix socket, where only processes of our own user are accepted."""

OWN_FILES = 128
"""File descriptors that a job needs besides those for agents and strangers: logs, pipes, ssh."""

FILES_AT_START = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""Our soft limit of open files before we raise it.  Programs that we start get this limit."""


def listen(plan: Plan) -> tuple[socket.socket, str]:
    """Return a listening socket that the plan's hosts can reach, and its address.

    The address is HOST:PORT, or @NAME for a Unix socket.  HOST is an address of the interface that leads to
    the hosts.  Raises HostError.
    """
    if plan.here_alone:
        name = f"cpulaunch-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{name}")  # an abstract address, which leaves no file behind
        listener.listen(BACKLOG)
        return listener, f"@{name}"
    host = _own_address(plan)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = plan.settings.hosts.ports
    try:
        listener = first_free(
            ports or [0], lambda port: socket.create_server((host, port), family=family, backlog=BACKLOG)
        )
    except OSError as e:
        where = f" on ports {plan.settings.hosts.port_range}" if ports else ""
        raise HostError(f"the launcher can't listen on {host}{where}: {e.strerror or e}") from None
    port = listener.getsockname()[1]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def max_strangers(here_alone: bool) -> int:
    """Return the limit of connections that aren't an agent's; ``here_alone``: on a Unix socket."""
    return MAX_STRANGERS_HERE if here_alone else MAX_STRANGERS


def allow_files(plan: Plan) -> None:
    """Raise our soft limit of open files to the hard limit.  Raises HostError if that is too low."""
    ranks = plan.world_size
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = ranks + max_strangers(plan.here_alone) + OWN_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise HostError(
            f"{ranks} ranks need {needed} open files in the launcher, but the limit is {hard}",
            hint=f"raise it (ulimit -Hn {needed}, as root), or start fewer ranks",
        )


class Starter:
    """Starts a job's commands in its directory, each in a session of its own.

    Commands get our environment with ``env`` added.  ``agents``: each command is an agent, which inherits our
    raised limit of open files, and gives its program the former limit.  ``stdin`` is the index of the command
    that gets our stdin, if `stdin_can_be_shared`.  All commands share one pipe for stdout and one for stderr;
    ``pipes`` are the ends to read from.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        env: Mapping[str, str],
        directory: JobDirectory,
        *,
        agents: bool,
        stdin: int = 0,
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._guards: list[subprocess.Popen[bytes]] = []
        self._commands, self._directory, self._agents, self._stdin = commands, directory, agents, stdin
        self._env = {**os.environ, **env}
        if agents:
            self._env[variables.OPEN_FILES] = str(FILES_AT_START)
        (out, self._out), (err, self._err) = os.pipe(), os.pipe()
        self.pipes = out, err

    @property
    def left(self) -> int:
        """The number of commands that have not been started."""
        return len(self._commands) - len(self.processes)

    def start_first(self) -> None:
        """Start the first commands, at most `at_once`.

        Raises HostError if a command can't be run, or one of its files can't be written; the commands started
        before are then killed.
        """
        try:
            while self.left and len(self.processes) < at_once():
                self.start_next()
        except BaseException:
            self.close()
            for fd in self.pipes:
                os.close(fd)
            for process in self.processes:
                process.kill()
                process.wait()
            raise

    def start_next(self) -> None:
        """Start the next command.  Raises HostError."""
        command = self._commands[len(self.processes)]
        _write_files(command.files, self._directory)
        shared = len(self.processes) == self._stdin and stdin_can_be_shared()
        stdin = None if shared else subprocess.DEVNULL
        with contextlib.nullcontext() if self._agents else _former_limit():
            self.processes.append(self._start(command, stdin))
        if not self.left:
            self.close()

    def close(self) -> None:
        """Close our writing ends of the pipes: no further command is started."""
        if self._out >= 0:
            os.close(self._out)
            os.close(self._err)
            self._out = self._err = -1

    def _start(self, command: Command, stdin: int | None) -> subprocess.Popen[bytes]:
        prepare = pid_pipe = None
        if command.orphaned_for:
            # Start the guard first, so that the command is never without one.  If no process can be started
            # for it, an orphan of the command would keep running.
            with contextlib.suppress(OSError):
                guard, pid_pipe = start_guard(
                    command.orphaned_for, self._env[variables.JOB_ID], command.leaves
                )
                self._guards.append(guard)
        if command.when_orphaned or pid_pipe is not None:
            prepare = partial(_in_child, command.when_orphaned, pid_pipe)
        inherited = {name: value for name, value in self._env.items() if name not in command.unset}
        try:
            return subprocess.Popen(
                command.argv,
                env={**inherited, **command.env, **command.watched_env},
                cwd=self._directory.place,
                stdin=stdin,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
                preexec_fn=prepare,  # None makes a start four times as fast
            )
        except OSError as e:
            raise HostError(cannot_run(command.argv[0], e)) from None
        finally:
            if pid_pipe is not None:
                os.close(pid_pipe)


def at_once() -> int:
    return max(AT_ONCE, 2 * len(os.sched_getaffinity(0)))


@contextlib.contextmanager
def _former_limit() -> Iterator[None]:
    """Give processes that are started in this context the limit of open files that we were started with."""
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_AT_START, raised[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, raised)


def _write_files(files: Mapping[str, str], directory: JobDirectory) -> None:
    for name, text in files.items():
        try:
            with open(directory.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                file.write(text)
        except OSError as e:
            raise HostError(f"{directory.path / name} can't be written: {e.strerror}") from None


_GUARD = str(Path(__file__).with_name("guard.py"))
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def signal_when_orphaned(number: int) -> None:
    """Let the kernel send us signal ``number`` when our parent dies.  A child calls it before its command."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _in_child(when_orphaned: int | None, pid_pipe: int | None) -> None:
    """Prepare a child for the case that the launcher is killed, before its command runs.

    The child gets the signal ``when_orphaned`` when its parent dies, and writes its process id to its guard's
    pipe ``pid_pipe``.
    """
    if when_orphaned:
        signal_when_orphaned(when_orphaned)
    if pid_pipe is not None:
        os.write(pid_pipe, str(os.getpid()).encode())


def start_guard(patience: float, job_id: str, leaves: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start a guard, which ends a command ``patience`` seconds after our own end.

    The guard also removes ``leaves``, a directory that the command leaves behind.  Returns the guard, and a
    pipe to which the command's process id has to be written.  Raises OSError.
    """
    temporary = next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp")  # as PRRTE does
    leaves = leaves and os.path.join(temporary, leaves)
    read, write = os.pipe()
    try:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, *map(str, (os.getpid(), patience, job_id, leaves))],
            env={},
            cwd="/",
            stdin=read,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        os.close(write)
        raise
    finally:
        os.close(read)
    return guard, write


def _own_address(plan: Plan) -> str:
    """Return our address on the interface that routes to the plan's hosts.  Raises HostError.

    The address of a loopback interface is returned only if all hosts are this machine: /etc/hosts may map
    this machine's name to such an address.
    """
    if plan.egress_interface:
        return plan.egress_interface.address
    failed = None
    for host in dict.fromkeys(host.host for host in plan.hosts):
        try:
            own = _address_towards(host)
        except OSError as e:
            failed = failed or HostError(
                f"host {host}: {e.strerror or e}",
                hint="check the name and /etc/hosts; an alias from ssh's configuration requires preflight",
            )
            continue
        if not is_loopback(own):
            return own
    if failed:
        raise failed
    return "127.0.0.1"


def _address_towards(host: str) -> str:
    """Return the source address of this host's packets to ``host``.  Raises OSError."""
    kind, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as s:
        s.connect(address)  # UDP: no packet is sent
        return str(s.getsockname()[0])


def stdin_can_be_shared() -> bool:
    """Whether a rank may read our stdin: a file, a pipe, or a terminal whose foreground job we are.

    The terminal's job control does not apply to ranks, because they have sessions of their own.
    """
    try:
        if stat.S_ISREG(mode := os.fstat(0).st_mode) or stat.S_ISFIFO(mode):
            return True
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
