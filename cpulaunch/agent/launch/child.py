"""Start a rank's program on its cores, and end it with all its descendants."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from cpulaunch.model.cores import CoreSet

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)

_MODES = {"prefer": 1, "bind": 2}  # MPOL_PREFERRED, MPOL_BIND of linux/mempolicy.h

# glibc has no function set_mempolicy.  Numbers of the system call by machine, from Linux's own tables.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}

DEAD_WITHIN = 2.0
"""Seconds within which a process ends after SIGKILL, unless a debugger or a dead file server holds it."""

TIDY_WITHIN = 1.0
"""Seconds that multiprocessing's resource tracker gets to remove what others left in /dev/shm."""


class Ended(NamedTuple):
    """How a process ended: with an exit code or by a signal.  The other field is None."""

    code: int | None
    signal: int | None

    @property
    def shell_code(self) -> int:
        """The code as a shell reports it: 128 + signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)


class AffinityError(OSError):
    """The kernel, or a filter of system calls (seccomp), refuses to put the program on its cores."""


class Program:
    """A running program, leader of its own process group."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cores: Collection[int],
        streams: tuple[int, int, int],
        stdin: bool,
        open_files: int,
    ) -> None:
        """Start ``argv`` on ``cores``; if ``cores`` is empty, on those that this process may use.

        The first two ``streams`` become the program's stdout and stderr, and the third keeps its number.
        The program reads our stdin if ``stdin``, else /dev/null.  It inherits the file descriptors that this
        process inherited, such as the MPI's for its PMI.  ``open_files`` is its soft limit of open files.

        Raises OSError if ``argv[0]`` can't be run, and AffinityError if the kernel refuses the cores.
        """
        os.set_inheritable(streams[2], True)
        agent = os.getpid()

        def prepare() -> None:
            os.setpgid(0, 0)
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            # Allow the agent's py-spy to trace it, though it isn't an ancestor (Yama's ptrace_scope 1).
            _libc.prctl(_PR_SET_PTRACER, agent, 0, 0, 0)
            if cores:
                try:
                    os.sched_setaffinity(0, cores)
                except OSError as e:
                    raise AffinityError(e.errno, e.strerror) from None
            set_open_files(open_files)
            if not stdin:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(streams[0], 1)
            os.dup2(streams[1], 2)

        self.pid = fork_and_exec(argv, env, prepare)
        self._ended: Ended | None = None
        self._given_up: set[int] = set()

    def poll(self) -> Ended | None:
        """Return how the program ended, or None while it runs.  Also reap its orphans."""
        self._reap_orphans()
        return self._ended or self._reap_program()

    def signal_group(self, number: int) -> None:
        if self._ended:
            return  # another process may have this pid by now
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # `kill` reports processes that may not be signaled
            pass

    def left_behind(self) -> bool:
        """Whether children of the ended program still run that `kill` hasn't given up."""
        self._reap_orphans()
        return any(pid != self.pid for pid in self._children())

    def left(self) -> list[str]:
        """The command lines of the children that `left_behind` counts."""
        return [command_line(pid) for pid in self._children() if pid != self.pid]

    def _reap_program(self) -> Ended | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            self._ended = Ended(code, None) if code >= 0 else Ended(None, -code)
            _remove_fabrics_memory(pid)
        return self._ended

    def _reap_orphans(self) -> None:
        for pid in _children():
            if pid != self.pid:
                self._reap(pid)

    def _reap(self, pid: int) -> bool:
        """Reap a child if it has ended; returns whether it is gone."""
        if pid == self.pid:
            return self._reap_program() is not None
        try:
            gone = os.waitpid(pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            gone = True
        if gone:
            self._given_up.discard(pid)  # another process may get this pid
        return gone

    def _children(self) -> list[int]:
        """Our children, without those that were given up."""
        return [pid for pid in _children() if pid not in self._given_up]

    def kill(self) -> list[str]:
        """Kill the program and all its descendants, in any process group or session.

        Processes that can't be killed are given up.  Returns a description of each.
        """
        began, left = time.monotonic(), []
        # As we are the subreaper, children of a killed process become ours.  Kill level by level.
        while children := self._children():
            tidying = time.monotonic() < began + TIDY_WITHIN
            for pid in children:
                if tidying and "multiprocessing.resource_tracker" in command_line(pid):
                    continue  # it ends by itself after all others
                try:
                    os.kill(pid, signal.SIGKILL)  # the pid stays ours until we reap it
                except PermissionError:
                    if not self._reap(pid):
                        left.append(self._give_up(pid, f"can't be ended: {os.strerror(errno.EPERM)}"))
            reaped = [pid for pid in children if self._reap(pid)]
            if not reaped:
                if time.monotonic() > began + DEAD_WITHIN:
                    why = f"has not ended {DEAD_WITHIN:g} s after SIGKILL"
                    left += [self._give_up(pid, why) for pid in self._children()]
                time.sleep(0.001)
        return left

    def _give_up(self, pid: int, why: str) -> str:
        self._given_up.add(pid)
        if pid == self.pid:
            self._ended = Ended(None, signal.SIGKILL)
        return f"process {pid} ({command_line(pid)}, user {_user(pid)}) {why}"


def fork_and_exec(argv: Sequence[str], env: Mapping[str, str], prepare: Callable[[], None]) -> int:
    """Start a new process that calls ``prepare`` and then runs ``argv``, and return its pid.

    The process has signals as they were before Python changed them.  This doesn't use subprocess, as its
    import would cost every agent 3 ms.  Raises OSError, or AffinityError from ``prepare``.
    """
    outcome, tell_outcome = os.pipe()  # a successful exec closes it; a failed child writes its errno
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            prepare()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(ignored, signal.SIG_DFL)
            os.execve(argv[0], list(argv), env)
        except BaseException as e:
            number = getattr(e, "errno", None) or errno.EINVAL
            os.write(tell_outcome, b"%d" % (-number if isinstance(e, AffinityError) else number))
        finally:
            os._exit(127)
    os.close(tell_outcome)
    with open(outcome, "rb") as pipe:
        if failure := pipe.read():
            os.waitpid(pid, 0)
            number = abs(int(failure))
            kind = AffinityError if failure.startswith(b"-") else OSError
            raise kind(number, os.strerror(number))
    return pid


def set_open_files(soft: int | None) -> int:
    """Set our soft limit of open files, or raise it to the hard limit if None.  Return the former limit."""
    former, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft is None else min(soft, hard), hard))
    return former


def adopt_orphans_and_die_with(parent_signal: int) -> None:
    """Become the parent of all orphaned descendants, and get ``parent_signal`` when our own parent dies."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with(os.getppid(), parent_signal)


def signal_pipe(numbers: Sequence[int]) -> int:
    """Return a file descriptor from which the numbers of these signals can be read as they arrive."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return ours


def die_with(parent: int, number: int) -> None:
    """Ask for a signal when our ``parent`` dies.  Send it at once if that has happened."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


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


def _remove_fabrics_memory(pid: int) -> None:
    """Remove the shared memory that libfabric leaves of a killed process: 64 MB as /dev/shm/PID:N:N."""
    try:
        names = os.listdir("/dev/shm")
    except OSError:
        return
    for name in names:
        if name.startswith(f"{pid}:"):
            try:
                os.unlink(f"/dev/shm/{name}")
            except OSError:
                pass  # it belongs to another user


def command_line(pid: int) -> str:
    """The command line of a process for display, at most 200 characters; its name if it has none."""
    for file in ("cmdline", "comm"):
        try:
            with open(f"/proc/{pid}/{file}", errors="replace") as f:
                words = f.read(200).replace("\0", " ").split()
        except OSError:
            continue
        if words:
            return "".join(c if c.isprintable() else "?" for c in " ".join(words))
    return "unknown"


def _user(pid: int) -> str:
    """The name of a process's effective user, or the user's number."""
    import pwd

    try:
        with open(f"/proc/{pid}/status") as f:
            number = int(next(line for line in f if line.startswith("Uid:")).split()[2])
    except (OSError, StopIteration):
        return "unknown"
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def set_memory_policy(policy: str) -> None:
    """Set this process's memory policy, such as ``prefer:1`` or ``bind:0-1``.  Raises OSError.

    Source: set_mempolicy(2).
    """
    mode, _, nodes = policy.partition(":")
    mask = sum(1 << node for node in CoreSet.parse(nodes))
    words = mask.bit_length() // 64 + 1
    numbers = (ctypes.c_uint64 * words)(*((mask >> (64 * i)) & (1 << 64) - 1 for i in range(words)))
    machine = os.uname().machine
    if machine not in _SET_MEMPOLICY:
        raise OSError(f"how to set it isn't known for {machine}")
    # The kernel reads one bit less than maxnode.
    if _libc.syscall(_SET_MEMPOLICY[machine], _MODES[mode], numbers, 64 * words + 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
