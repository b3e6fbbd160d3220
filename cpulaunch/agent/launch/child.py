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

# Machine → number of the system call set_mempolicy, for which glibc has no function.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}

KILL_TIMEOUT = 2.0
"""Seconds after SIGKILL until a process counts as unkillable, for example due to a dead file server."""

TRACKER_TIMEOUT = 1.0
"""Seconds that multiprocessing's resource tracker gets to clean up /dev/shm."""


class Ended(NamedTuple):
    """How a process ended: with an exit code or by a signal.  The other field is None."""

    code: int | None
    signal: int | None

    @property
    def shell_code(self) -> int:
        """The code as a shell reports it: 128 + signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)


class AffinityError(OSError):
    """The kernel, or a seccomp filter, refuses to put the program on its cores."""


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
        """Start ``argv`` on ``cores``.  If ``cores`` is empty, the program inherits this process's CPU mask.

        The first two ``streams`` become the program's stdout and stderr, and the third keeps its number.
        If ``stdin`` is true, the program reads this process's stdin, else /dev/null.  It inherits this
        process's file descriptors, such as the PMI connection of an MPI.  ``open_files`` is its soft limit
        of open files.

        Raises OSError if ``argv[0]`` can't be run, and AffinityError if the kernel refuses the cores.
        """
        os.set_inheritable(streams[2], True)
        agent = os.getpid()

        def prepare() -> None:
            os.setpgid(0, 0)
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            # With Yama's ptrace_scope 1, only ancestors may trace a process; this also allows py-spy.
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
        self._unkillable: set[int] = set()

    def poll(self) -> Ended | None:
        """Return how the program ended, or None while it runs.  Also reap its orphans."""
        self._reap_orphans()
        return self._ended or self._reap_program()

    def signal_group(self, number: int) -> None:
        if self._ended:
            return  # the pid may belong to another process now
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # `kill` reports a missing permission
            pass

    def has_leftovers(self) -> bool:
        """Whether children of the ended program still run, other than unkillable ones."""
        self._reap_orphans()
        return any(pid != self.pid for pid in self._children())

    def leftovers(self) -> list[str]:
        """The command lines of children that still run, other than the program and unkillable ones."""
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
        """Reap a child if it has ended.  Return whether it is gone."""
        if pid == self.pid:
            return self._reap_program() is not None
        try:
            gone = os.waitpid(pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            gone = True
        if gone:
            self._unkillable.discard(pid)  # another process may get this pid
        return gone

    def _children(self) -> list[int]:
        """The pids of our children, other than unkillable ones."""
        return [pid for pid in _children() if pid not in self._unkillable]

    def kill(self) -> list[str]:
        """Kill the program and all its descendants, in any process group or session.

        Returns a description of each process that can't be killed.
        """
        began, failures = time.monotonic(), []
        # The agent is the subreaper: children of a killed process become its own.  Kill level by level.
        while children := self._children():
            tracker_has_time = time.monotonic() < began + TRACKER_TIMEOUT
            for pid in children:
                if tracker_has_time and "multiprocessing.resource_tracker" in command_line(pid):
                    continue  # it exits after all other processes
                try:
                    os.kill(pid, signal.SIGKILL)  # no other process can get this pid until it is reaped
                except PermissionError:
                    if not self._reap(pid):
                        failures.append(self._give_up(pid, f"can't be ended: {os.strerror(errno.EPERM)}"))
            reaped = [pid for pid in children if self._reap(pid)]
            if not reaped:
                if time.monotonic() > began + KILL_TIMEOUT:
                    why = f"has not ended {KILL_TIMEOUT:g} s after SIGKILL"
                    failures += [self._give_up(pid, why) for pid in self._children()]
                time.sleep(0.001)
        return failures

    def _give_up(self, pid: int, why: str) -> str:
        self._unkillable.add(pid)
        if pid == self.pid:
            self._ended = Ended(None, signal.SIGKILL)
        return f"process {pid} ({command_line(pid)}, user {_user(pid)}) {why}"


def fork_and_exec(argv: Sequence[str], env: Mapping[str, str], prepare: Callable[[], None]) -> int:
    """Start a new process that calls ``prepare`` and then runs ``argv``, and return its pid.

    The process has the default signal handlers instead of Python's.  This doesn't use subprocess, because
    importing it would cost every agent 3 ms.  Raises OSError, or AffinityError from ``prepare``.
    """
    outcome, errno_end = os.pipe()  # a successful exec closes the pipe; a failed child writes its errno
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
            os.write(errno_end, b"%d" % (-number if isinstance(e, AffinityError) else number))
        finally:
            os._exit(127)
    os.close(errno_end)
    with open(outcome, "rb") as pipe:
        if failure := pipe.read():
            os.waitpid(pid, 0)
            number = abs(int(failure))
            kind = AffinityError if failure.startswith(b"-") else OSError
            raise kind(number, os.strerror(number))
    return pid


def set_open_files(soft: int | None) -> int:
    """Set the soft limit of open files; None means the hard limit.  Return the former soft limit."""
    former, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft is None else min(soft, hard), hard))
    return former


def adopt_orphans_and_die_with(parent_signal: int) -> None:
    """Adopt all orphaned descendants, and request ``parent_signal`` for the death of our own parent."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with(os.getppid(), parent_signal)


def signal_pipe(numbers: Sequence[int]) -> int:
    """Return a file descriptor that yields the number of each of these signals when it arrives."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return read_end


def die_with(parent: int, number: int) -> None:
    """Request a signal for the death of our ``parent``.  If it is already dead, send the signal at once."""
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
    """Remove libfabric's shared memory of a killed process: 64 MB in /dev/shm/PID:N:N."""
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
    """The command line of a process, or its name, in at most 200 printable characters."""
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
    """The name or number of a process's effective user."""
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
        raise OSError(f"cpulaunch can't set it on {machine}")
    # The kernel reads one bit less than maxnode.
    if _libc.syscall(_SET_MEMPOLICY[machine], _MODES[mode], numbers, 64 * words + 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
