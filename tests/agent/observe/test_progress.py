"""The progress that an agent reports, from the program's ledger and its output."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.agents import PlayedLauncher, placement

from cpulaunch import messages, variables

WRITES = """
from cpulaunch import ledger
memory = ledger.of_this_process
def write(steps, collectives, at, gap, waiting):
    ledger.PROGRESS.pack_into(memory, 0, ledger.MAGIC, ledger.HAS_OPTIMIZER, steps, collectives, at, gap, waiting)
"""
SLEEP = "\nprint('ready', flush=True)\nimport time\ntime.sleep(300)\n"


def asked(launcher: PlayedLauncher) -> messages.Beat:
    launcher.say(messages.AskProgress())
    return launcher.next(messages.Beat)


def test_an_agent_reports_its_programs_progress_at_once(tmp_path: Path) -> None:
    program = WRITES + "write(7, 140, 10**15, 5 * 10**8, 125 * 10**7)" + SLEEP
    with PlayedLauncher(placement(tmp_path), program) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready\n")
        assert asked(launcher) == messages.Beat(7, 140, 0.5, 1.25, True, len("ready\n"), 10.0**6, True)


def test_output_of_a_program_counts_as_progress(tmp_path: Path) -> None:
    before = time.monotonic()
    with PlayedLauncher(placement(tmp_path), SLEEP) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready\n")
        beat = asked(launcher)
        assert beat.progressed_at is not None
        assert before < beat.progressed_at < time.monotonic()
        assert beat == messages.Beat(printed=len("ready\n"), progressed_at=beat.progressed_at)


def test_the_end_of_a_program_is_reported_while_its_exit_handlers_run(tmp_path: Path) -> None:
    program = "import atexit, time\natexit.register(lambda: (print('ready', flush=True), time.sleep(300)))"
    with PlayedLauncher(placement(tmp_path), program) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready\n")
        beat = asked(launcher)
        assert beat.leaving
        assert beat.progressed_at is not None


def test_a_program_that_only_sleeps_makes_no_progress(tmp_path: Path) -> None:
    with PlayedLauncher(placement(tmp_path), "import time\ntime.sleep(300)") as launcher:
        launcher.welcome()
        launcher.next(messages.Found)
        assert asked(launcher) == messages.Beat()


def test_progress_comes_with_the_heartbeats(tmp_path: Path) -> None:
    program = WRITES + "write(7, 140, 10**15, 0, 0)" + SLEEP
    with PlayedLauncher(placement(tmp_path, heartbeat_timeout=1), program) as launcher:
        launcher.welcome()
        launcher.wait_for_output("ready\n")
        assert launcher.next(messages.Beat).steps == 7


def test_the_ledger_can_be_read_after_its_program_was_killed(tmp_path: Path) -> None:
    """The launcher asks the agent for progress after the program has ended."""
    program = WRITES + (
        "import os, signal, subprocess\n"
        "write(7, 140, 10**15, 0, 0)\n"
        "print('ready', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with PlayedLauncher(placement(tmp_path), program) as launcher:
        launcher.welcome()
        assert launcher.next(messages.Exit).signal == 9
        assert asked(launcher).collectives == 140


@pytest.mark.parametrize(
    "child",
    [
        "subprocess.run([sys.executable, '-c', PROGRAM], close_fds=False)",
        "multiprocessing.get_context('spawn').Process(target=exec, args=(PROGRAM,)).start()",
        "os.fork() or exec(PROGRAM)",
    ],
)
def test_child_processes_have_no_ledger(tmp_path: Path, child: str) -> None:
    looks = (
        "import os\nfrom cpulaunch import ledger\n"
        "files = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')]\n"
        "files = [os.readlink(file) for file in files if os.path.islink(file)]\n"
        f"print(ledger.of_this_process, {variables.LEDGER_FD!r} in os.environ)\n"
        "print([file for file in files if 'ledger' in file] if SPAWNED else [], 'seen', flush=True)\n"
    ).replace("SPAWNED", str(not child.startswith("os.fork")))
    program = (
        f"import multiprocessing, os, subprocess, sys\nPROGRAM = {looks!r}\n"
        "if __name__ == '__main__':\n"
        f"    from cpulaunch import ledger\n    assert ledger.of_this_process\n    {child}\n"
    )
    with PlayedLauncher(placement(tmp_path), program) as launcher:
        launcher.welcome()
        seen = ""
        while not isinstance(message := launcher.hear(), messages.Exit):
            seen += message.data if isinstance(message, messages.Output) else ""
        assert "None False\n[] seen" in seen


def test_a_program_that_closed_its_inherited_files_has_no_ledger(tmp_path: Path) -> None:
    """The program reuses the ledger's descriptor for another file, which must stay open."""
    program = (
        "import os\n"
        "os.closerange(3, 100)\n"
        "kept = [os.open('data', os.O_RDWR | os.O_CREAT) for _ in range(50)]\n"
        "os.truncate('data', 1 << 20)\n"
        "from cpulaunch import ledger\n"
        "print(ledger.of_this_process, flush=True)\n"
        "assert all(os.fstat(fd) for fd in kept)"
    )
    with PlayedLauncher(placement(tmp_path), program) as launcher:
        launcher.welcome()
        launcher.wait_for_output("None")
        assert launcher.next(messages.Exit).code == 0
