"""Processes and shared memory that remain after the end of a program."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import PlayedLauncher, placement, run_agent

from cpulaunch import messages, wire

NOBODY = 65534

_PR_CAPBSET_DROP = 24
_CAP_KILL = 5
_PTRACE_SEIZE = 0x4206
_libc = ctypes.CDLL(None, use_errno=True)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of two users")


def without_cap_kill() -> None:
    """Take from the agent, which runs as root, the right to signal other users' processes."""
    assert _libc.prctl(_PR_CAPBSET_DROP, _CAP_KILL, 0, 0, 0) == 0


# A child switches to another user and keeps writing to the rank's stdout.  The file `pid` has its pid.
ANOTHER_USERS_CHILD = f"""
import os, pathlib, signal, sys, time
read, write = os.pipe()
if os.fork() == 0:
    os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
    os.write(write, b"%d" % os.getpid())
    try:
        while True:
            os.write(1, b"still here\\n")
    except OSError:
        time.sleep(300)
pathlib.Path("pid").write_text(os.read(read, 9).decode())
"""


@pytest.fixture
def leftover(tmp_path: Path) -> Iterator[Path]:
    """A file to which a program writes the pid of a leftover process, which is killed after the test."""
    yield tmp_path / "pid"
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def notes_and_exit(launcher: PlayedLauncher) -> tuple[list[str], messages.Exit]:
    notes = []
    while not isinstance(message := launcher.hear(), messages.Exit):
        notes += [message.note] if isinstance(message, messages.Note) else []
    return notes, message


@needs_root
@pytest.mark.parametrize("code", [0, 3])
def test_a_child_that_may_not_be_signaled_is_named_and_left(
    tmp_path: Path, leftover: Path, code: int
) -> None:
    program = ANOTHER_USERS_CHILD + f"sys.exit({code})"
    with PlayedLauncher(placement(tmp_path), program, preexec_fn=without_cap_kill) as launcher:
        launcher.welcome()
        (note,), end = notes_and_exit(launcher)
        assert (end.code, end.by_launcher) == (code, False)
        launcher.say(messages.Release())
        assert launcher.end()[0] == 0
    assert note.startswith(f"rank 0: process {leftover.read_text()} (")
    assert note.endswith("program.py, user nobody) can't be ended: Operation not permitted")


@needs_root
def test_a_program_that_may_not_be_signaled_is_named_and_left(tmp_path: Path, leftover: Path) -> None:
    program = (
        f"import os, time\nopen('pid', 'w').write(str(os.getpid()))\nos.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
        "print('ready', flush=True)\ntime.sleep(300)"
    )
    with PlayedLauncher(placement(tmp_path), program, preexec_fn=without_cap_kill) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready")
        launcher.say(messages.End(signal.SIGTERM, 0.1))
        (note,), end = notes_and_exit(launcher)
        assert (end.code, end.signal, end.by_launcher) == (None, signal.SIGKILL, True)
        launcher.say(messages.Release())
        assert launcher.end()[0] == 0
    assert f"process {leftover.read_text()} (" in note
    os.kill(int(leftover.read_text()), 0)  # it still runs


def test_a_program_stopped_by_a_debugger_is_named_and_left_alone(tmp_path: Path) -> None:
    """The kernel reports the end of a traced process to its tracer first, and only then to its parent."""
    with PlayedLauncher(
        placement(tmp_path), "print('ready', flush=True)\nimport time\ntime.sleep(300)"
    ) as launcher:
        launcher.welcome()
        program = launcher.next(messages.Started).pid
        launcher.wait_for_output("ready")
        if _libc.ptrace(_PTRACE_SEIZE, program, None, None):
            pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
        launcher.say(messages.End(signal.SIGKILL, 0))
        (note,), end = notes_and_exit(launcher)
        assert (end.signal, end.by_launcher) == (signal.SIGKILL, True)
        os.waitpid(program, 0)
    assert note.startswith(f"rank 0: process {program} (")
    assert note.endswith("has not ended 2 s after SIGKILL")


def test_a_killed_programs_memory_of_libfabric_is_removed(tmp_path: Path) -> None:
    """Shared memory of other processes remains."""
    program = (
        "import os, signal\n"
        "for pid in (os.getpid(), os.getppid()):\n    open(f'/dev/shm/{pid}:0:0', 'x').close()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with PlayedLauncher(placement(tmp_path), program) as launcher:
        launcher.welcome()
        killed = launcher.next(messages.Started).pid
        assert launcher.next(messages.Exit).signal == signal.SIGKILL
        others = Path(f"/dev/shm/{launcher.agent.pid}:0:0")
        try:
            assert not Path(f"/dev/shm/{killed}:0:0").exists()
            assert others.exists()
        finally:
            others.unlink(missing_ok=True)


# A daemon that detaches by a double fork, and a grandchild that only SIGKILL ends.
DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path("pid").write_text(str(os.getpid()))
        print("ready", flush=True)
        time.sleep(300)
    os._exit(0)
"""
DEAF_GRANDCHILD = """
if os.fork() == 0:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path("pid").write_text(str(os.getpid()))
        print("ready", flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize(
    ("leave", "code"), [(DAEMON, 3), (DEAF_GRANDCHILD, 0)], ids=["a daemon", "a deaf grandchild"]
)
def test_processes_that_a_program_leaves_behind_are_ended(tmp_path: Path, leave: str, code: int) -> None:
    program = (
        f"import os, pathlib, signal, sys, time\n{leave}\n"
        f"while not os.path.exists('pid') or not open('pid').read():\n    time.sleep(0.01)\nsys.exit({code})"
    )
    with PlayedLauncher(placement(tmp_path, grace_period=0.1), program) as launcher:
        launcher.welcome()
        notes, end = notes_and_exit(launcher)
        assert (notes, end.code, end.signal, end.by_launcher) == ([], code, None, False)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("child", ["raise ValueError('of the child')", "os.kill(os.getpid(), 9)"])
def test_the_end_of_a_forked_child_is_not_reported_as_the_ranks_end(tmp_path: Path, child: str) -> None:
    program = (
        "import os, sys, time\nif os.fork() == 0:\n"
        f"    {child}\nos.wait()\nprint('waited', flush=True)\ntime.sleep(300)"
    )
    with PlayedLauncher(placement(tmp_path), program) as launcher:
        launcher.welcome()
        seen = b""
        while b"waited" not in seen:
            message = launcher.hear()
            assert not isinstance(message, (messages.Failure, messages.Exit))
            if isinstance(message, messages.Output):
                seen += wire.unpack(message.data)
        # If the child's end had been taken for the rank's, by_launcher would be False below.
        launcher.say(messages.End(signal.SIGTERM, 30.0))
        end = launcher.next(messages.Exit)
        assert (end.code, end.signal, end.by_launcher) == (None, signal.SIGTERM, True)


def test_a_forked_childs_exit_code_is_not_reported_as_the_ranks(tmp_path: Path) -> None:
    program = (
        "import os, sys\nchild = os.fork() == 0\nif not child:\n    os.wait()\nsys.exit(7 if child else 4)"
    )
    done = run_agent(placement(tmp_path), program)
    assert done.returncode == 4
