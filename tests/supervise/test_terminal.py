"""What the terminal shows while a job runs: folded lines, bars, a status line; and one that takes nothing."""

from __future__ import annotations

import asyncio
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

from cpulaunch.model.cores import CoreSet
from cpulaunch.supervise.output import Output
from cpulaunch.supervise.terminal import Screen


def test_equal_lines_of_many_ranks_are_one_unless_all_are_asked_for(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "warn.py").write_text(
        "import os\nprint('same')\nprint('mine', os.environ['RANK'])\nprint('same again')"
    )
    four = ("run", "-n", "4", "--oversubscribe")
    lines = cpulaunch(*four, "warn.py").stdout.splitlines()
    same = [line for line in lines if line.endswith("] same")]
    # All at once, or three of them and one that came a moment later, …
    assert sorted(rank for line in same for rank in CoreSet.parse(line[1:].partition("]")[0])) == [0, 1, 2, 3]
    assert sorted(line for line in lines if "mine" in line) == [f"[{rank}] mine {rank}" for rank in range(4)]
    assert lines.index(same[0]) < lines.index("[0] mine 0") < len(lines) - 1
    assert len(cpulaunch(*four, "--tee", "all", "warn.py").stdout.splitlines()) == 12
    assert len(cpulaunch("run", "-n", "2", "warn.py").stdout.splitlines()) == 6


def test_lines_of_three_ranks_are_folded_and_of_two_are_not() -> None:
    async def shown() -> list[tuple[int, bytes]]:
        screen = Remembering()
        output = Output(Path("/nonexistent"), frozenset(range(4)), screen, lambda line: None, fold=True)
        for rank in range(4):
            output.feed(rank, 1, b"all\n" + (b"two\n" if rank < 2 else b""))
        await screen.said.wait()
        return screen.put_in

    assert asyncio.run(asyncio.wait_for(shown(), TIMEOUT)) == [(1, b"[0-3] all\n[0] two\n[1] two\n")]


class Remembering(Screen):
    """Shows nothing, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.put_in: list[tuple[int, bytes]] = []
        self.said = asyncio.Event()

    def put(self, stream: int, data: bytes) -> None:
        self.put_in.append((stream, data))
        self.said.set()


def test_of_a_line_drawn_over_and_over_the_last_state_is_shown(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "bar.py").write_text(
        "import sys\nfor i in range(101): sys.stdout.write(f'\\r{i}%')\nprint('\\r\\nwindows\\r\\n', end='')"
    )
    done = cpulaunch("run", "-n", "2", "--tee", "all", "bar.py", text=False)
    shown = done.stdout.decode().splitlines()
    assert shown.count("[0] 100%") == 1
    assert shown.count("[1] windows") == 1
    assert len(shown) <= 8  # and a look or two at the bar while it grew
    (log,) = tmp_path.glob("runs/*/rank-0.log")
    assert log.read_bytes().count(b"\r") == 103


def test_many_lines_pass_without_loss(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text("for i in range(100_000): print(i, 'x' * 60)")
    done = cpulaunch("run", "-n", "2", "--tee", "all", "many.py")
    for rank in (0, 1):
        numbers = re.findall(rf"^\[{rank}\] (\d+) x{{60}}$", done.stdout, re.MULTILINE)
        assert numbers == [str(i) for i in range(100_000)]


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


def test_a_status_line_says_how_it_goes_and_goes_itself(marked, tmp_path: Path) -> None:
    terminal = waiting(tmp_path, marked)
    terminal.expect(r"cpulaunch: 2 of 2 ranks up · \d+ s")
    (tmp_path / "go").touch()
    terminal.expect(r"\r\x1b\[K\[[01]\] done")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert not re.search(r"ranks up[^\x1b]*$", terminal.before)  # it was cleared, if drawn again


def test_on_a_narrow_terminal_the_status_line_stays_one_line(marked, tmp_path: Path) -> None:
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
    """A terminal for a program, the other end of which nobody reads."""
    ours, theirs = pty.openpty()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


@pytest.mark.slow
def test_a_terminal_that_takes_nothing_makes_nobody_deaf(marked, tmp_path: Path) -> None:
    """As after Ctrl-S, or with `less` at work."""
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


@pytest.mark.slow
def test_want_of_memory_is_told_from_a_kill(cpulaunch: Run, tmp_path: Path) -> None:
    """In a memory cgroup of version 1 or 2, where we may make one."""
    with memory_cgroup(64 << 20) as procs:
        greedy = "x = [bytearray(1 << 20) for _ in range(1000)]"
        command = f"echo $$ > {procs} && exec {sys.executable} -c '{greedy}'"
        done = cpulaunch("run", "-n", "1", "--no-python", "sh", "-c", command)
    assert done.returncode == 137, done.stderr
    title, lines = box(done.stderr)
    assert title == "rank 0 on localhost failed first"
    assert lines[0] == "SIGKILL (killed)"
    assert re.search("ran out of memory and says: .*Killed process|killed for want of memory", lines[1])


def test_a_kill_from_outside_is_not_taken_for_want_of_memory(cpulaunch: Run, tmp_path: Path) -> None:
    done = cpulaunch("run", "-n", "1", "--no-python", "sh", "-c", "kill -9 $$")
    assert done.returncode == 137
    assert re.match(r"not for want of memory \(it had had up to 0\.\d\d GiB\)", box(done.stderr)[1][1])


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """The cgroup.procs of a new group of ``limit`` bytes."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, name = (one, "memory.limit_in_bytes") if one.is_dir() else (two, "memory.max")
    group = parent / f"cpulaunch-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no cgroup can be made in {parent}: {e}")
    try:
        if not (group / name).exists():
            pytest.skip(f"{parent} doesn't limit memory")
        (group / name).write_text(str(limit))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "much.py").write_text("for i in range(5000): print(i, 'x' * 60)")
    (tmp_path / "runs").mkdir()
    command = f"mount -t tmpfs -o size=100k tmpfs runs && exec {sys.executable} -m cpulaunch run -n 2 much.py"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("can't be written: No space left on device") == 1
    assert "[0] 4999 x" in done.stdout
