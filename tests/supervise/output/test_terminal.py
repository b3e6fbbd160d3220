"""The terminal while a job runs: a status line, events, and a blocked terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from support.command import TIMEOUT, Run, clean_environment
from support.jobs import box, outcome


def waiting(directory: Path, env: dict[str, str], columns: int = 80) -> pexpect.spawn:
    """A job on a terminal, whose ranks wait for a file ``go`` and then say "done"."""
    (directory / "wait.py").write_text(
        "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.02)\nprint('done')"
    )
    return pexpect.spawn(
        sys.executable,
        ["-m", "cpulaunch", "run", "-n", "2", "wait.py"],
        cwd=str(directory),
        env=clean_environment(**env, TERM="xterm"),
        timeout=TIMEOUT,
        encoding="utf-8",
        dimensions=(24, columns),
    )


def test_a_status_line_shows_the_progress_and_disappears(marked, tmp_path: Path) -> None:
    terminal = waiting(tmp_path, marked)
    terminal.expect(r"cpulaunch: 2 of 2 ranks up · \d+ s")
    (tmp_path / "go").touch()
    terminal.expect(r"\r\x1b\[K\[(0-1|[01])\] done")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert not re.search(r"ranks up[^\x1b]*$", terminal.before)  # if it was drawn again, it was cleared


def test_the_status_line_is_one_line_on_a_narrow_terminal(marked, tmp_path: Path) -> None:
    terminal = waiting(tmp_path, marked, columns=20)
    terminal.expect("cpulaunch: 2 of 2 r")
    (tmp_path / "go").touch()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert "ranks up" not in terminal.before


def test_verbose_shows_every_event(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')")
    done = cpulaunch("run", "-n", "2", "-v", "hello.py")
    for rank in (0, 1):
        assert re.search(rf"s: rank {rank} on localhost: type=started pid=\d+ cores=", done.stderr)
        assert f"rank {rank} on localhost: type=exit code=0" in done.stderr


@contextlib.contextmanager
def nobody_reads() -> Iterator[int]:
    """A terminal for a program; nobody reads its other end."""
    ours, theirs = pty.openpty()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


@pytest.mark.slow
def test_the_box_begins_on_its_own_line(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("import sys\nsys.stderr.write('no end')\nsys.exit(5)")
    done = cpulaunch("run", "-n", "1", "fail.py")
    assert "no end\n╭" in done.stderr
    assert box(done.stderr)[1][0] == "exit code 5"


def test_a_blocked_terminal_does_not_block_the_job(marked, tmp_path: Path) -> None:
    """As after Ctrl-S, or with `less`."""
    (tmp_path / "talk.py").write_text(
        "import itertools\nfor i in itertools.count():\n    print('x' * 70, flush=True)\n"
        "    if i == 20_000: open('talked', 'w').close()\n"
    )
    with nobody_reads() as terminal:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--grace-period", "2", "talk.py"],
            cwd=tmp_path,
            env=clean_environment(**marked),
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
        )
        try:
            waiter = "import pathlib, time\nwhile not pathlib.Path('talked').exists(): time.sleep(0.02)"
            subprocess.run([sys.executable, "-c", waiter], cwd=tmp_path, timeout=TIMEOUT, check=True)
            launcher.send_signal(signal.SIGINT)
            assert launcher.wait(TIMEOUT) == 130
        finally:
            launcher.kill()
            launcher.wait(TIMEOUT)
    assert outcome(tmp_path)["kind"] == "interrupted"
