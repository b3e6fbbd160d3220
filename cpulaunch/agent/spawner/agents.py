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
        """``argv`` is the command line of each agent, ``size`` the number of all ranks of the job, and
        ``open_files`` the agents' soft limit of open files.
        """
        self._host, self._argv, self._size, self._open_files = host, argv, size, open_files
        self._codes: dict[int, int | None] = {}  # pid → exit code as a shell reports it

    def start(self, environ: Mapping[str, str], reader: int, its_stdin: int) -> None:
        """Start one agent for each rank.

        The rank ``reader`` gets the descriptor ``its_stdin``, and the others /dev/null.  Raises OSError.
        """
        spawner, limit = os.getpid(), self._open_files
        nothing = os.open(os.devnull, os.O_RDONLY)
        for local_rank in range(self._host.ranks):
            rank = self._host.first + local_rank
            identity = map(str, (rank, self._size, local_rank, self._host.ranks))
            own = dict(zip(variables.LOCAL_IDENTITY, identity, strict=True))

            def prepare(stdin: int = its_stdin if rank == reader else nothing) -> None:
                die_with(spawner, signal.SIGKILL)  # until the agent asks for SIGTERM instead
                set_open_files(limit)
                os.dup2(stdin, STDIN)

            self._codes[fork_and_exec(self._argv, {**environ, **own}, prepare)] = None
        os.close(nothing)

    def __contains__(self, pid: int) -> bool:
        return pid in self._codes

    def ended(self, pid: int, status: int) -> int:
        """Record that an agent has ended with this status of waitpid, and return its exit code."""
        code = os.waitstatus_to_exitcode(status)
        self._codes[pid] = code = 128 - code if code < 0 else code
        return code

    @property
    def exit_code(self) -> int | None:
        """The first exit code that isn't 0, in the order of ranks; None while any agent runs."""
        codes = list(self._codes.values())
        return None if None in codes else next(filter(None, codes), 0)

    def signal(self, number: int) -> None:
        """Send a signal and SIGCONT to all running agents: a stopped one gets a signal once it continues."""
        for pid, code in self._codes.items():
            if code is None:
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)


class Input:
    """A pipe to the agent that reads stdin.  ``wanted`` is called when all data has been written.

    ``end`` is the agent's end; close it once the agent has started.
    """

    def __init__(self, selector: selectors.BaseSelector, wanted: Callable[[], None]) -> None:
        self.end, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._selector, self._wanted = selector, wanted
        self._data = b""

    def give(self, data: bytes) -> None:
        """Write ``data`` when there is room.  Empty data closes the pipe."""
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
        """Close the pipe, so that the program reads the end of its stdin."""
        if self._pipe < 0:
            return
        if self._pipe in self._selector.get_map():
            self._selector.unregister(self._pipe)
        os.close(self._pipe)
        self._pipe = -1
