"""Starting a rank's program on its cores, and ending it with all that it started."""

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

# glibc has no function for it.  Numbers of the system calls by machine, of Linux's own tables.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}

DEAD_WITHIN = 2.0
"""Seconds in which a process ends that gets SIGKILL, unless a debugger or a dead file server holds it."""

TIDY_WITHIN = 1.0
"""Seconds that Python's resource tracker has to remove what the others have left in /dev/shm."""


class Ended(NamedTuple):
    """How a process ended: by an exit code, or by a signal; one of them is None."""

    code: int | None
    signal: int | None

    @property
    def shell_code(self) -> int:
        """The code as a shell reports it: 128 + signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)


class AffinityError(OSError):
    """The kernel, or a filter of system calls, refuses to put the program on its cores."""


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
        """Start ``argv`` on ``cores`` with the first two ``streams`` as its stdout and stderr, our stdin, or
        none, and a soft limit of ``open_files``.

        The third of the streams keeps its number, and file descriptors that this process inherited (the
        MPI's, for its PMI) are handed on.  Without ``cores``, it may run wherever we may.

        Raises OSError where ``argv[0]`` can't be run, and AffinityError where its cores are refused.
        """
        os.set_inheritable(streams[2], True)
        self.pid = _start(argv, env, cores, streams, stdin, open_files)
        self._ended: Ended | None = None
        self._given_up: set[int] = set()

    def poll(self) -> Ended | None:
        """How the program ended, or None while it runs.  Orphans that it left are reaped, too."""
        self._reap_orphans()
        return self._ended or self._reap_program(os.WNOHANG)

    def signal_group(self, number: int) -> None:
        """Send a signal to the program and those of its children that stayed in its group."""
        if self._ended:
            return  # the number may be somebody else's by now
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # `kill` says who may not be signaled
            pass

    def left_behind(self) -> bool:
        """Whether children of the ended program are still there, and haven't been given up."""
        self._reap_orphans()
        return any(pid != self.pid for pid in self._children())

    def left(self) -> list[str]:
        """The command lines of such children."""
        return [command_line(pid) for pid in self._children() if pid != self.pid]

    def _reap_program(self, options: int = 0) -> Ended | None:
        pid, status = os.waitpid(self.pid, options)
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
            return self._reap_program(os.WNOHANG) is not None
        try:
            gone = os.waitpid(pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            gone = True
        if gone:
            self._given_up.discard(pid)  # the number may be another one's soon
        return gone

    def _children(self) -> list[int]:
        """Our children, but those that were given up."""
        return [pid for pid in _children() if pid not in self._given_up]

    def kill(self) -> list[str]:
        """End the program and all its descendants now, wherever they moved themselves to.

        Those that can't be ended are given up: what is known of each of them is returned.
        """
        began, left = time.monotonic(), []
        # Whoever loses its parent becomes ours, as we are the subreaper: level by level, all of them.
        while children := self._children():
            tidying = time.monotonic() < began + TIDY_WITHIN
            for pid in children:
                if tidying and _is_resource_tracker(pid):
                    continue  # it ends by itself once all others have
                try:
                    os.kill(pid, signal.SIGKILL)  # it stays ours, a zombie at least, until we reap it
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


def _start(
    argv: Sequence[str],
    env: Mapping[str, str],
    cores: Collection[int],
    streams: tuple[int, int, int],
    stdin: bool,
    open_files: int,
) -> int:
    """The pid of a new process that runs ``argv``."""
    agent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # The agent's py-spy may look at it, though it isn't an ancestor (Yama's ptrace_scope 1).
        _libc.prctl(_PR_SET_PTRACER, agent, 0, 0, 0)
        if cores:
            _pin(cores)
        set_open_files(open_files)
        if not stdin:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(streams[0], 1)
        os.dup2(streams[1], 2)

    return fork_and_exec(argv, env, prepare)


def fork_and_exec(argv: Sequence[str], env: Mapping[str, str], prepare: Callable[[], None]) -> int:
    """The pid of a new process that calls ``prepare``, and then runs ``argv``.  Raises OSError.

    Python's own changes to signals are undone.  Importing subprocess would cost every agent 3 ms.
    """
    outcome, tell_outcome = os.pipe()  # closed by a successful exec, else the child says why it failed
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            prepare()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python itself
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


def _pin(cores: Collection[int]) -> None:
    """Put this process on ``cores``.  Raises AffinityError."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as e:
        raise AffinityError(e.errno, e.strerror) from None


def set_open_files(soft: int | None) -> int:
    """Set our soft limit of open files; None sets the hard one.  Returns what it was."""
    former, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft is None else min(soft, hard), hard))
    return former


def adopt_orphans_and_die_with(parent_signal: int) -> None:
    """Become the parent of all orphaned descendants; get ``parent_signal`` when our own parent dies."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, int(parent_signal), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), parent_signal)


def signal_pipe(numbers: Sequence[int]) -> int:
    """A file descriptor from which the numbers of these signals can be read once they have come."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return ours


def die_with(parent: int, number: int) -> None:
    """In a new process: get a signal when ``parent`` dies, which may have happened already."""
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


def _is_resource_tracker(pid: int) -> bool:
    """Whether it removes the semaphores and the shared memory of Python's multiprocessing."""
    return "multiprocessing.resource_tracker" in command_line(pid)


def _remove_fabrics_memory(pid: int) -> None:
    """Remove what libfabric leaves of a killed process: 64 MB, /dev/shm/PID:N:N."""
    try:
        names = os.listdir("/dev/shm")
    except OSError:
        return
    for name in names:
        if name.startswith(f"{pid}:"):
            try:
                os.unlink(f"/dev/shm/{name}")
            except OSError:
                pass  # another user's


def command_line(pid: int) -> str:
    """The command line of a process, as it is shown to people; its name where it has none."""
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
    """The name of the user whose rights a process has, or its number."""
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
    """Take memory as ``policy`` says: ``prefer:1``, or ``bind:0-1``.  Raises OSError.

    Source: set_mempolicy(2).
    """
    mode, _, nodes = policy.partition(":")
    mask = sum(1 << node for node in CoreSet.parse(nodes))
    words = mask.bit_length() // 64 + 1
    numbers = (ctypes.c_uint64 * words)(*((mask >> (64 * i)) & (1 << 64) - 1 for i in range(words)))
    machine = os.uname().machine
    if machine not in _SET_MEMPOLICY:
        raise OSError(f"how to set it isn't known for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    if libc.syscall(_SET_MEMPOLICY[machine], _MODES[mode], numbers, 64 * words + 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
