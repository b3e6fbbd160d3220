"""One rank has the terminal: debuggers and prompts work in this rank, and Ctrl-C ends the job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run, clean_environment, mpi_options
from support.marks import by_launcher, repeat
from support.terminal import CTRL_C, Terminal

DEBUGGED = """
import os
secret = 40 + int(os.environ["RANK"])
if int(os.environ["RANK"]) == {rank}:
    breakpoint()
print("went on", flush=True)
"""

ASKS = """
import os
if os.environ["RANK"] == "0":
    answer = input("your name? ")
    print("hello", answer)
"""

Start = Callable[..., Terminal]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a job with the given script and options on a new terminal."""
    started = []

    def start(script: str, *options: str) -> Terminal:
        (tmp_path / "script.py").write_text(script)
        job = ["run", "--oversubscribe", "--backend", "gloo", "--precision", "fp32", *options, "script.py"]
        env = clean_environment(TERM="dumb")
        started.append(Terminal(tmp_path, env, [sys.executable, "-m", "cpulaunch", *job]))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.parametrize(
    ("launcher", "ranks", "rank"),
    by_launcher(
        ((launcher, *each) for launcher in ("local", "intel") for each in ((1, 0), (2, 0), (2, 1))),
        usual=[("intel", 2, 1)],
    ),
)
def test_a_debugger_has_the_terminal(launcher: str, ranks: int, rank: int, terminal: Start) -> None:
    options = ["--launcher", "local"] if launcher == "local" else mpi_options(launcher)
    with_rank = ["--stdin", str(rank)] if rank else []
    shown = terminal(DEBUGGED.format(rank=rank), "-n", str(ranks), *options, *with_rank)
    shown.sees("(Pdb) ")
    shown.types("p secret + 2\r")
    shown.sees(str(42 + rank))
    shown.sees("(Pdb) ")
    shown.types("c\r")
    shown.sees("went on")
    assert shown.ends() == 0


def test_a_prompt_is_shown_before_the_answer_is_typed(terminal: Start) -> None:
    shown = terminal(ASKS, "-n", "2")
    shown.answers("[0] your name? ", "Ada")
    shown.sees("hello Ada")
    assert shown.ends() == 0


def test_ctrl_c_ends_a_job_whose_rank_reads_the_terminal(terminal: Start) -> None:
    shown = terminal(ASKS, "-n", "1")
    shown.sees("your name? ")
    shown.types(CTRL_C)
    assert shown.ends() == 130


def test_a_job_in_the_background_leaves_the_terminal_alone(tmp_path: Path) -> None:
    """Only the shell can read from the terminal."""
    (tmp_path / "script.py").write_text(ASKS)
    job = f"{sys.executable} -m cpulaunch run -n 1 --backend gloo --precision fp32 script.py"
    line = f"set -m; {job} 2>errors & wait $!; echo code $?; read line; echo shell $line"
    shown = Terminal(tmp_path, clean_environment(TERM="dumb"), ["bash", "-c", line])
    try:
        shown.sees("code 1")
        shown.types("mine\r")
        shown.sees("shell mine")
        assert shown.ends() == 0
    finally:
        shown.close()
    assert "EOF" in (tmp_path / "errors").read_text()


@pytest.mark.parametrize(
    "launcher",
    ["local", repeat("intel"), pytest.param("openmpi", marks=pytest.mark.slow)],
)
def test_piped_input_goes_to_the_named_rank(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "read.py").write_text("import sys; print(repr(sys.stdin.readline()))")
    options = ["--launcher", "local"] if launcher == "local" else mpi_options(launcher)
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--stdin", "1", *options, "read.py"],
        cwd=tmp_path, input="hello\n", text=True, capture_output=True, timeout=TIMEOUT,
        env=clean_environment(),
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == ["[0] ''", "[1] 'hello\\n'"], done.stderr


def test_an_mpi_that_cannot_pass_stdin_to_the_rank_is_an_error_at_once(
    cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "read.py").write_text("")
    done = cpulaunch("run", "-n", "2", "--stdin", "1", *mpi_options("mpich"), "--dry-run", "read.py")
    assert done.returncode == 2
    assert "--stdin 1: mpiexec of mpich can pass stdin only to rank 0" in done.stderr


def test_a_rank_that_does_not_exist_cannot_get_stdin(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "read.py").write_text("")
    done = cpulaunch("run", "-n", "2", "--stdin", "2", "--dry-run", "read.py")
    assert done.returncode == 2
    assert "there is no rank 2, as there are 2" in done.stderr
    assert os.listdir(tmp_path) == ["read.py"]
