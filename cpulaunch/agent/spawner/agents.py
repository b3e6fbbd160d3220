"""The agents of a spawner's own host, and the stdin of one rank where that comes from another host."""

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
    """The agents of one host: processes that die with us."""

    def __init__(self, host: Host, argv: list[str], size: int, open_files: int) -> None:
        """``argv`` is the command line of each, ``size`` the number of all ranks of the job, ``open_files``
        the soft limit that they start with.
        """
        self._host, self._argv, self._size, self._open_files = host, argv, size, open_files
        self._codes: dict[int, int | None] = {}  # by pid: its exit code, as a shell reports it

    def start(self, environ: Mapping[str, str], reader: int, its_stdin: int) -> None:
        """Start one for each rank; the rank ``reader`` reads ``its_stdin``.  Raises OSError."""
        spawner, limit = os.getpid(), self._open_files
        nothing = os.open(os.devnull, os.O_RDONLY)
        for local_rank in range(self._host.ranks):
            rank = self._host.first + local_rank
            identity = map(str, (rank, self._size, local_rank, self._host.ranks))
            own = dict(zip(variables.LOCAL_IDENTITY, identity, strict=True))

            def prepare(stdin: int = its_stdin if rank == reader else nothing) -> None:
                die_with(spawner, signal.SIGKILL)  # until it has asked for something milder itself
                set_open_files(limit)
                os.dup2(stdin, STDIN)

            self._codes[fork_and_exec(self._argv, {**environ, **own}, prepare)] = None
        os.close(nothing)

    def __contains__(self, pid: int) -> bool:
        return pid in self._codes

    def ended(self, pid: int, status: int) -> int:
        """One of them has ended with this status of waitpid; its exit code."""
        code = os.waitstatus_to_exitcode(status)
        self._codes[pid] = code = 128 - code if code < 0 else code
        return code

    @property
    def exit_code(self) -> int | None:
        """The first that isn't 0; None while any of them runs."""
        codes = list(self._codes.values())
        return None if None in codes else next(filter(None, codes), 0)

    def signal(self, number: int) -> None:
        """Send a signal to all that run; one that is stopped would get it only when it goes on."""
        for pid, code in self._codes.items():
            if code is None:
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)


class Input:
    """A pipe to the reader's agent.  ``wanted`` is called when all that it was given is written.

    ``end`` is the agent's, to be closed once that is started.
    """

    def __init__(self, selector: selectors.BaseSelector, wanted: Callable[[], None]) -> None:
        self.end, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._selector, self._wanted = selector, wanted
        self._data = b""

    def give(self, data: bytes) -> None:
        """Write it when there is room; without data, that is the end."""
        if self._pipe < 0:
            return
        if not data:
            self.close()
        elif self._pipe not in self._selector.get_map():
            self._data = data
            self._selector.register(self._pipe, selectors.EVENT_WRITE, self._write)

    def _write(self) -> None:
        try:
            self._data = self._data[os.write(self._pipe, self._data) :]
        except BlockingIOError:
            return
        except OSError:  # the program has closed it
            self.close()
            return
        if not self._data:
            self._selector.unregister(self._pipe)
            self._wanted()

    def close(self) -> None:
        """The program finds the end of its stdin."""
        if self._pipe < 0:
            return
        if self._pipe in self._selector.get_map():
            self._selector.unregister(self._pipe)
        os.close(self._pipe)
        self._pipe = -1
