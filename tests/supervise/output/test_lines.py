"""The ranks' output: folded lines, progress bars, nothing lost, and a full disk."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run, clean_environment
from support.jobs import box
from support.marks import repeat

from cpulaunch.model.cores import CoreSet
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.output.lines import Output
from cpulaunch.supervise.output.logs import OPEN_LOGS
from cpulaunch.supervise.output.terminal import Screen


class Remembering(Screen):
    """Shows nothing, and records the output."""

    def __init__(self) -> None:
        super().__init__()
        self.put_in: list[tuple[int, bytes]] = []
        self.said = asyncio.Event()

    def put(self, stream: int, data: bytes) -> None:
        self.put_in.append((stream, data))
        self.said.set()


NO_PLACE = Path("/proc")
"""A directory in which no file can be made."""


def output_of(ranks: int, fold: bool) -> tuple[Output, Remembering]:
    screen = Remembering()
    return Output(
        JobDirectory(NO_PLACE), frozenset(range(ranks)), screen, lambda line: None, fold=fold
    ), screen


def test_equal_lines_of_many_ranks_are_shown_once_unless_all_are_requested(
    cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "warn.py").write_text(
        "import os\nprint('same')\nprint('mine', os.environ['RANK'])\nprint('same again')"
    )
    four = ("run", "-n", "4", "--oversubscribe")
    lines = cpulaunch(*four, "warn.py").stdout.splitlines()
    same = [line for line in lines if line.endswith("] same")]
    # All four ranks together, or three of them and the fourth a moment later, …
    assert sorted(rank for line in same for rank in CoreSet.parse(line[1:].partition("]")[0])) == [0, 1, 2, 3]
    assert sorted(line for line in lines if "mine" in line) == [f"[{rank}] mine {rank}" for rank in range(4)]
    assert lines.index(same[0]) < lines.index("[0] mine 0") < len(lines) - 1
    assert len(cpulaunch(*four, "--tee", "all", "warn.py").stdout.splitlines()) == 12
    assert len(cpulaunch("run", "-n", "2", "warn.py").stdout.splitlines()) == 6


def test_lines_of_three_ranks_are_folded_and_of_two_are_not() -> None:
    async def shown() -> list[tuple[int, bytes]]:
        output, screen = output_of(4, fold=True)
        for rank in range(4):
            output.feed(rank, 1, b"all\n" + (b"two\n" if rank < 2 else b""))
        await screen.said.wait()
        return screen.put_in

    assert asyncio.run(asyncio.wait_for(shown(), TIMEOUT)) == [(1, b"[0-3] all\n[0] two\n[1] two\n")]


def test_the_last_of_several_states_is_shown() -> None:
    output, screen = output_of(2, fold=False)
    output.feed(0, 1, b"\r1%\r2%\r100%\r\nend\n")
    assert screen.put_in == [(1, b"[0] 100%\n[0] end\n")]


def test_a_bar_grows_and_is_shown_until_it_completes(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "bar.py").write_text(
        "import sys\nfor i in range(101): sys.stdout.write(f'\\r{i}%')\nprint('\\r\\nwindows\\r\\n', end='')"
    )
    done = cpulaunch("run", "-n", "2", "--tee", "all", "bar.py", text=False)
    shown = done.stdout.decode().splitlines()
    for rank in (0, 1):
        # The bar was shown once or twice while it grew, and then complete.
        *states, last = [line.partition("] ")[2] for line in shown if line.startswith(f"[{rank}] ")]
        numbers = [int(state.removesuffix("%")) for state in states]
        assert numbers == sorted(numbers)
        assert (numbers[-1], last) == (100, "windows")
    (log,) = tmp_path.glob("runs/*/rank-0.log")
    assert log.read_bytes().count(b"\r") == 103


def test_many_lines_pass_without_loss(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text("for i in range(100_000): print(i, 'x' * 60)")
    done = cpulaunch("run", "-n", "2", "--tee", "all", "many.py")
    for rank in (0, 1):
        numbers = re.findall(rf"^\[{rank}\] (\d+) x{{60}}$", done.stdout, re.MULTILINE)
        assert numbers == [str(i) for i in range(100_000)]


def test_logs_of_many_ranks_take_few_descriptors(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for finished in (False, True):
        warnings: list[str] = []
        output = Output(directory, frozenset(), Remembering(), warnings.append)
        for line in range(3):
            for rank in range(300):
                output.feed(rank, 1, b"line %d of rank %d\n" % (line, rank))
        if finished:
            for rank in range(300):
                output.finish(rank)
        assert output.logs.close(TIMEOUT)
        assert warnings == []
        assert len(os.listdir("/proc/self/fd")) - before <= (
            1 if finished else OPEN_LOGS
        )  # the file of their order stays open
        del output
    for rank in range(300):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert log == 2 * "".join(f"line {line} of rank {rank}\n" for line in range(3))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("code", [repeat(0), 3])
def test_a_full_disk_is_reported_for_the_logs_and_the_outcome(tmp_path: Path, code: int) -> None:
    """The last output of a failing rank is shown, although its log lacks it."""
    (tmp_path / "much.py").write_text(
        "import os, sys\nif os.environ['RANK'] == '1':\n"
        f"    for i in range(5000): print(i, 'x' * 60)\n    sys.exit({code})"
    )
    (tmp_path / "runs").mkdir()
    command = (
        # An outcome of so many ranks needs more space than the removal of control.json frees.
        f"mount -t tmpfs -o size=200k tmpfs runs && {sys.executable} -m cpulaunch run -n 48 --oversubscribe "
        "much.py; code=$?; "
        "! ls runs/*/outcome.json* 2>/dev/null && exit $code"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == code, done.stderr
    for file in (r"[\da-f-]+", r"[\da-f-]+/outcome\.json"):
        assert len(re.findall(rf"{file} can't be written: No space left on device", done.stderr)) == 1
    if code == 0:
        assert "[1] 4999 x" in done.stdout
    else:
        assert [f"{i} {60 * 'x'}" for i in range(4992, 5000)] == box(done.stderr)[1][3:11]


class TestFigures:
    """Lines with metrics, which the final table summarizes, so a terminal doesn't need them."""

    TEXT = (
        b"begin\n50 %CPULAUNCH_METRIC p=3 ms\nCPULAUNCH_METRIC x=1\nCPULAUNCH_METRIC broken\n"
        b"CPULAUNCH_METRICS\nCPULAUNCH_METRIC " + 2000 * b"y" + b"\nend CPULAUNCH_METR"
    )
    LEFT = (
        b"begin\n50 %CPULAUNCH_METRIC broken\nCPULAUNCH_METRICS\nCPULAUNCH_METRIC "
        + 2000 * b"y"
        + b"\nend CPULAUNCH_METR"
    )

    @pytest.mark.parametrize("size", [1, 7, 100, 5000])
    @pytest.mark.parametrize("left_out", [True, False])
    def test_are_left_out_on_request_and_nothing_else_is(self, size: int, left_out: bool) -> None:
        output, screen = output_of(1, fold=False)
        if left_out:
            output.hide_metrics()
        for at in range(0, len(self.TEXT), size):
            output.feed(0, 1, self.TEXT[at : at + size])
        output.feed(0, 2, b"CPULAUNCH_METRIC x=1\n")
        output.finish(0)
        shown = {stream: b"".join(d for s, d in screen.put_in if s == stream) for stream in (1, 2)}
        assert shown == {1: self.LEFT if left_out else self.TEXT, 2: b"CPULAUNCH_METRIC x=1\n"}

    def test_that_several_ranks_print_have_a_prefix(self) -> None:
        output, screen = output_of(2, fold=False)
        output.hide_metrics()
        for rank in (0, 1):
            output.feed(rank, 1, b"CPULAUNCH_METRIC x=1\na\nCPULAUNCH")
            output.finish(rank)
        assert b"".join(d for _, d in screen.put_in) == b"[0] a\n[0] CPULAUNCH\n[1] a\n[1] CPULAUNCH\n"

    def test_may_lack_the_last_line_end(self) -> None:
        output, screen = output_of(1, fold=False)
        output.hide_metrics()
        output.feed(0, 1, b"a\nCPULAUNCH_METRIC x=1")
        output.finish(0)
        assert b"".join(d for _, d in screen.put_in) == b"a\n"
