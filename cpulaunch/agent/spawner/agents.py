"""The agents of a spawner's own host, and the pipe to the rank that reads stdin from another host."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Mapping

from cpulaunch import variables
from cpulaunch.agent.launch.child import die_with, fork_and_exec, set_open_files
from cpulaunch.agent.spawner.messages import Host

STDIN = 0


class Agents:
    """The agents of one host.  They are killed when the spawner dies."""

    def __init__(self, host: Host, argv: list[str], size: int, open_files: int) -> None:
        """``argv`` is each agent's command line, ``size`` the job's number of ranks, and ``open_files`` the
        agents' soft limit of open files.
        """
        self._host, self._argv, self._size, self._open_files = host, argv, size, open_files
        self._codes: dict[int, int | None] = {}  # pid → exit code as a shell reports it

    def start(self, environ: Mapping[str, str], reader: int, reader_stdin: int) -> None:
        """Start one agent for each rank.  Raises OSError.

        The stdin of rank ``reader`` is the descriptor ``reader_stdin``; the other ranks get /dev/null.
        """
        spawner, limit = os.getpid(), self._open_files
        devnull = os.open(os.devnull, os.O_RDONLY)
        for local_rank in range(self._host.ranks):
            rank = self._host.first + local_rank
            identity = map(str, (rank, self._size, local_rank, self._host.ranks))
            own = dict(zip(variables.LOCAL_IDENTITY, identity, strict=True))

            def prepare(stdin: int = reader_stdin if rank == reader else devnull) -> None:
                die_with(spawner, signal.SIGKILL)  # until the agent asks for SIGTERM instead
                set_open_files(limit)
                os.dup2(stdin, STDIN)

            self._codes[fork_and_exec(self._argv, {**environ, **own}, prepare)] = None
        os.close(devnull)

    def __contains__(self, pid: int) -> bool:
        return pid in self._codes

    def record_exit(self, pid: int, status: int) -> int:
        """Record an agent's status from waitpid, and return its exit code."""
        code = os.waitstatus_to_exitcode(status)
        self._codes[pid] = code = 128 - code if code < 0 else code
        return code

    @property
    def exit_code(self) -> int | None:
        """The first nonzero exit code in the order of ranks, or 0; None while any agent runs."""
        codes = list(self._codes.values())
        return None if None in codes else next(filter(None, codes), 0)

    def signal(self, number: int) -> None:
        """Send a signal to all running agents, and SIGCONT, as a stopped process handles no signals."""
        for pid, code in self._codes.items():
            if code is None:
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)


class Input:
    """A pipe to the agent that reads stdin.  ``drained`` is called when all data has been written.

    ``end`` is the agent's end; close it once the agent has started.
    """

    def __init__(self, selector: selectors.BaseSelector, drained: Callable[[], None]) -> None:
        self.end, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._selector, self._drained = selector, drained
        self._data = b""

    def write(self, data: bytes) -> None:
        """Write ``data`` once the pipe has room.  Empty data closes the pipe."""
        if self._pipe < 0:
            return
        if not data:
            self.close()
        elif self._pipe not in self._selector.get_map():
            self._data = data
            self._selector.register(self._pipe, selectors.EVENT_WRITE, self._write_ready)

    def _write_ready(self) -> None:
        try:
            self._data = self._data[os.write(self._pipe, self._data) :]
        except BlockingIOError:
            return
        except OSError:  # the program has closed it
            self.close()
            return
        if not self._data:
            self._selector.unregister(self._pipe)
            self._drained()

    def close(self) -> None:
        """Close the pipe, so that the program reads the end of its stdin."""
        if self._pipe < 0:
            return
        if self._pipe in self._selector.get_map():
            self._selector.unregister(self._pipe)
        os.close(self._pipe)
        self._pipe = -1
