"""Messages between agents and a launcher, which the test plays."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from support.agents import PlayedLauncher, placement, run_agent
from support.namespaces import until

from cpulaunch import messages
from cpulaunch.agent.observe import processes
from cpulaunch.wording import PORT_IS_TAKEN

READY = "print('ready', flush=True)\n"
SLEEP = READY + "import time\ntime.sleep(300)\n"
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP


def state_of(pid: int) -> str:
    found = processes.stat(pid)
    return found.state if found else ""


def played(directory: Path, program: str, **different: object) -> PlayedLauncher:
    return PlayedLauncher(placement(directory, **different), program)


def test_an_agent_reports_its_identity_and_its_programs_end(tmp_path: Path) -> None:
    with played(tmp_path, "import sys\nprint('out')\nsys.exit(5)") as launcher:
        hello = launcher.welcome()
        assert (hello.version, hello.rank, hello.pid) == (messages.VERSION, 0, launcher.agent.pid)
        started = launcher.next(messages.Started)
        assert (started.threads, started.notes) == (1, [])
        launcher.wait_for_output("out\n")
        end = launcher.next(messages.Exit)
        assert (end.code, end.signal, end.by_launcher, end.by_signal) == (5, None, False, 0)
        launcher.say(messages.Release())
        assert launcher.end() == (0, "", "")  # the launcher knows the exit code, so the agent exits with 0


def test_a_program_that_raises_is_reported_before_it_ends(tmp_path: Path) -> None:
    with played(tmp_path, "x = 1\nraise ValueError('no such luck')") as launcher:
        launcher.welcome()
        failure = launcher.next(messages.Failure)
        assert (failure.error, failure.file, failure.line) == ("ValueError: no such luck", "program.py", 2)
        assert not failure.by_launcher
        assert launcher.next(messages.Exit).code == 1


def test_a_program_that_the_launcher_ends_is_reported_as_ended_by_it(tmp_path: Path) -> None:
    with played(tmp_path, SLEEP) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready")
        launcher.say(messages.End(signal.SIGTERM, 30.0))
        end = launcher.next(messages.Exit)
        assert (end.code, end.signal, end.by_launcher) == (None, signal.SIGTERM, True)


def test_a_stopped_program_is_continued_so_that_it_can_end(tmp_path: Path) -> None:
    with played(tmp_path, SLEEP) as launcher:
        launcher.welcome()
        pid = launcher.next(messages.Started).pid
        launcher.wait_for_output("ready")
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) == "T", "the program to be stopped")
        launcher.say(messages.End(signal.SIGTERM, 600.0))
        end = launcher.next(messages.Exit)
        assert (end.code, end.signal, end.by_launcher) == (None, signal.SIGTERM, True)


def test_a_program_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    with played(tmp_path, DEAF) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready")
        launcher.say(messages.End(signal.SIGTERM, 0.1))
        end = launcher.next(messages.Exit)
        assert (end.code, end.signal, end.by_launcher, end.cause) == (None, signal.SIGKILL, True, None)


SAVING = """
import signal
from cpulaunch.runtime.reports import saves_at
saves_at([signal.SIGTERM])
signal.signal(signal.SIGTERM, lambda *_: print('saving', flush=True))
"""


def test_a_program_that_saves_is_killed_if_the_job_has_failed(tmp_path: Path) -> None:
    with played(tmp_path, SAVING + SLEEP) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready")
        launcher.say(messages.End(signal.SIGTERM, 600.0))
        launcher.wait_for_output("saving")
        launcher.say(messages.End(signal.SIGTERM, 600.0, failed=True))
        end = launcher.next(messages.Exit)
        assert (end.code, end.signal, end.by_launcher) == (None, signal.SIGKILL, True)


def test_a_program_that_was_already_exiting_keeps_its_exit_code(tmp_path: Path) -> None:
    program = (
        "import atexit, time\ndef leave():\n    print('leaving', flush=True)\n    time.sleep(300)\n"
        "atexit.register(leave)\nraise SystemExit(3)"
    )
    with played(tmp_path, program) as launcher:
        launcher.welcome()
        launcher.wait_for_output("leaving")  # the agent has reported before that the program is leaving
        launcher.say(messages.End(signal.SIGTERM, 30.0))
        end = launcher.next(messages.Exit)
        assert (end.code, end.signal, end.by_launcher, end.finished) == (3, None, True, True)


def test_a_killed_program_does_not_count_as_ended_by_the_launcher(tmp_path: Path) -> None:
    """Its peers, whose connections break, may fail before the agent notices the end of its program."""
    killed = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), 9))\n"
    with played(tmp_path, killed + SLEEP) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready")
        launcher.say(messages.End(signal.SIGTERM, 30.0))
        end = launcher.next(messages.Exit)
        assert (end.code, end.signal, end.by_launcher) == (None, signal.SIGKILL, False)


def test_a_signal_to_the_agent_is_named_as_the_cause_of_the_end(tmp_path: Path) -> None:
    with played(tmp_path, SLEEP) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready")
        launcher.agent.send_signal(signal.SIGTERM)
        end = launcher.next(messages.Exit)
        assert (end.signal, end.by_launcher, end.by_signal) == (signal.SIGTERM, False, signal.SIGTERM)
        assert end.cause == {"kind": "agent_signaled", "signal": 15}


def test_an_agent_sends_its_clocks_time_first(tmp_path: Path) -> None:
    with played(tmp_path, SLEEP) as launcher:
        hello = launcher.welcome()
        before = time.monotonic()
        launcher.say(messages.AskTime())
        assert hello.at < before <= launcher.next(messages.Time).at <= time.monotonic()


def test_the_program_is_ended_if_the_launcher_is_gone(tmp_path: Path) -> None:
    with played(tmp_path, SLEEP) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready")
        launcher.hang_up()
        assert launcher.end() == (128 + signal.SIGTERM, "", "")


def test_a_message_of_an_unknown_kind_is_reported_once_and_ends_nothing(tmp_path: Path) -> None:
    with played(tmp_path, SLEEP) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready")
        launcher.say_line(b'{"type":"pause"}\n{"type":"pause"}\n')
        launcher.say(messages.End(signal.SIGTERM, 30.0))
        told = []
        while not isinstance(message := launcher.hear(), messages.Exit):
            told += [message.note] if isinstance(message, messages.Note) else []
        assert told == ["rank 0: the launcher sent a message of an unknown kind, 'pause'"]


REPORTS = """
import os, sys
for name in os.listdir("/proc/self/fd"):  # child processes inherit the descriptor, too
    try:
        if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
            for line in LINES:
                os.write(int(name), line + b"\\n")
    except OSError:
        pass
"""


def reporting(*lines: bytes) -> str:
    return f"LINES = {list(lines)!r}\n{REPORTS}"


def test_a_report_of_an_unknown_kind_is_logged_once(tmp_path: Path) -> None:
    with played(tmp_path, reporting(b'{"type":"step"}', b'{"type":"step"}')) as launcher:
        launcher.welcome()
        told = []
        while not isinstance(message := launcher.hear(), messages.Exit):
            told += [message.note] if isinstance(message, messages.Note) else []
        assert told == ["rank 0: the program reported something of an unknown kind, 'step'"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"exit","code":0,"signal":null,"at":0,"by_launcher":true,"by_signal":0,"cause":null}',
        b'{"type":"release"}',
        b'{"type":"end","signal":9,"grace":0}',
        b'{"type":"torch","threads":"many","requested":""}',
        b"nonsense",
    ],
)
def test_a_program_cannot_speak_as_its_agent(tmp_path: Path, line: bytes) -> None:
    with played(tmp_path, reporting(line) + "sys.exit(6)") as launcher:
        launcher.welcome()
        end = launcher.next(messages.Exit)
        assert (end.code, end.by_launcher) == (6, False)


def test_an_agent_without_a_launcher_prefixes_output_and_exits_like_its_program(tmp_path: Path) -> None:
    done = run_agent(placement(tmp_path), reporting(b'{"type":"step"}') + "print('hello')\nsys.exit(6)")
    assert (done.returncode, done.stdout) == (6, "[0] hello\n")
    assert done.stderr == "[0] cpulaunch: rank 0: the program reported something of an unknown kind, 'step'\n"


def test_a_master_port_in_use_is_refused_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        done = run_agent(placement(tmp_path), "print('started')", {"MASTER_PORT": str(port)})
    error = f"MASTER_PORT {port} of localhost: Address already in use; {PORT_IS_TAKEN}"
    assert (done.returncode, done.stdout, done.stderr) == (3, "", f"[0] cpulaunch: {error}\n")
