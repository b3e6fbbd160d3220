"""Starting a rank's program on its cores, and ending it with all that it started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Ended(NamedTuple):
    """How a process ended: by an exit code, or by a signal; one of them is None."""

    code: int | None
    signal: int | None

    @property
    def shell_code(self) -> int:
        """The code as a shell reports it: 128 + signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)


class Program:
    """A running program, leader of its own process group."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cores: Collection[int],
        streams: tuple[int, int],
        keep: Sequence[int],
        stdin: bool,
    ) -> None:
        """Start ``argv`` on ``cores`` with ``streams`` as its stdout and stderr, and our stdin, or none.

        File descriptors that this process inherited (the MPI's, for its PMI) and those of ``keep``
        are handed on.  Raises OSError where ``argv[0]`` can't be run.
        """
        for fd in keep:
            os.set_inheritable(fd, True)

        def in_child() -> None:
            os.setpgid(0, 0)
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            os.sched_setaffinity(0, cores)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

        self._process = subprocess.Popen(
            argv,
            env=env,
            stdin=None if stdin else subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            close_fds=False,
            preexec_fn=in_child,
        )
        self.pid = self._process.pid

    def poll(self) -> Ended | None:
        """How the program ended, or None while it runs.  Orphans that it left are reaped, too."""
        self._reap_orphans()
        status = self._process.poll()
        if status is None:
            return None
        return Ended(status, None) if status >= 0 else Ended(None, -status)

    def signal_group(self, number: int) -> None:
        """Send a signal to the program and those of its children that stayed in its group."""
        if self._process.returncode is not None:
            return  # the number may be somebody else's by now
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def left_behind(self) -> bool:
        """Whether children of the ended program are still there."""
        self._reap_orphans()
        return any(pid != self.pid for pid in _children())

    def _reap_orphans(self) -> None:
        for pid in _children():
            if pid != self.pid:
                _reap(pid)

    def kill(self) -> None:
        """End the program and all its descendants now, wherever they moved themselves to."""
        self.signal_group(signal.SIGKILL)
        # Whoever loses its parent becomes ours, as we are the subreaper: level by level, all of them.
        while children := _children():
            for pid in children:
                os.kill(pid, signal.SIGKILL)  # it stays ours, a zombie at least, until we reap it
            for pid in children:
                if pid == self.pid:
                    self._process.wait()
                else:
                    _reap(pid, wait=True)


def adopt_orphans_and_die_with(parent_signal: int) -> None:
    """Become the parent of all orphaned descendants; get ``parent_signal`` when our own parent dies."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, int(parent_signal), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), parent_signal)


def _children() -> list[int]:
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as f:
            return [int(pid) for pid in f.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == me]


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return int(f.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _reap(pid: int, wait: bool = False) -> None:
    try:
        os.waitpid(pid, 0 if wait else os.WNOHANG)
    except ChildProcessError:
        pass
