"""``cpulaunch logs`` merges the output of real jobs, while they run and afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run, bounded, clean_environment
from support.jobs import job

from cli.conftest import popen
from cpulaunch.supervise.output.merge import MergedLogs, Piece, Renderer

PRINTS = """\
import os, sys, time
for step in range(20):
    print("step", step, flush=True)
    time.sleep(0.002 * (1 + int(os.environ["RANK"])))
    print("loss", step, file=sys.stderr, flush=True)
for percent in range(0, 101, 50):
    print(f"\\r{percent} %", end="", flush=True)
print("\\nhalf a line", end="", flush=True)
"""

# Both attempts wait for a file after the first line of output.  Then the first attempt fails.
FAILS_ONCE = """\
import os, pathlib, time
attempt = os.environ["CPULAUNCH_RESTART_COUNT"]
print("ready" if attempt == "0" else f"again {attempt}", flush=True)
while not pathlib.Path(f"go-{attempt}").exists(): time.sleep(0.05)
if attempt == "0" and os.environ["RANK"] == "1": raise ValueError("once")
while attempt == "0": time.sleep(1)
print("done", flush=True)
"""


def test_lines_of_all_ranks_are_in_the_same_order_as_on_the_terminal(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    ran = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "prints.py"],
        cwd=tmp_path,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    shown = [line for line in ran.stdout.splitlines() if line.startswith("[")]
    assert len(shown) == 84
    assert cpulaunch("logs").stdout.splitlines() == shown
    (directory,) = tmp_path.glob("runs/*")
    one = cpulaunch("logs", directory, "--rank", "1", text=False).stdout
    assert one == (directory / "rank-1.log").read_bytes()
    both = cpulaunch("logs", directory.name[:20], "--rank", "0-1").stdout
    assert both.splitlines() == shown
    (directory / "output.order").unlink()  # missing, as if the disk had been full
    assert {line for line in shown if "step" in line} <= set(cpulaunch("logs", "runs").stdout.splitlines())


def test_logs_are_followed_through_a_restart_until_the_job_ends(
    marked: dict[str, str], tmp_path: Path
) -> None:
    with (
        job(tmp_path, marked, ["--max-restarts", "1", "--restart-on", "error"], FAILS_ONCE) as launcher,
        bounded(popen(tmp_path, marked, "logs", "-f", "runs")) as following,
    ):
        assert following.stdout
        assert {following.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
        (tmp_path / "go-0").touch()
        lines = []
        while not lines or not lines[-1].endswith("] again 1\n"):
            lines.append(following.stdout.readline())
            assert lines[-1], "it ended before the job did"
        assert [line for line in lines if line.startswith("====")] == ["==== cpulaunch: restart 1 ====\n"]
        assert "[1] ValueError: once\n" in lines
        (tmp_path / "go-1").touch()
        assert launcher.wait(TIMEOUT) == 0
        rest = following.stdout.read().splitlines()
        assert sorted(line for line in rest if "done" in line) == ["[0] done", "[1] done"]
        assert following.wait(TIMEOUT) == 0


def test_equal_lines_of_many_ranks_are_merged() -> None:
    renderer = Renderer()
    pieces = [Piece(1.0 + rank / 100, rank, 1, b"same\nrank %d\n" % rank) for rank in range(4)]
    later = Piece(2.0, 3, 1, b"same\n")
    text = b"".join(data for piece in (*pieces, later) for _, data in renderer.feed(piece))
    assert text == b"[0-3] same\n[0] rank 0\n[1] rank 1\n[2] rank 2\n[3] rank 3\n"
    assert b"".join(data for _, data in renderer.finish()) == b"[3] same\n"


def test_no_output_is_lost_if_the_order_file_does_not_match_the_logs(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_bytes(b"one\ntwo\n")
    (tmp_path / "rank-1.log").write_bytes(b"three\n")
    (tmp_path / "output.order").write_bytes(b"0.1 0 1 4\nnonsense\n0.2 7 1 5\n0.3 1 1 6\n")
    with MergedLogs(tmp_path, lambda rank: True) as logs:
        assert [piece.data for piece in logs.more()] == [b"one\n"]
        assert [piece.data for piece in logs.rest()] == [b"two\n", b"three\n"]


def test_for_a_job_without_output_there_is_a_message(cpulaunch: Run, tmp_path: Path) -> None:
    assert cpulaunch("run", "-n", "2", "--oversubscribe", "--no-python", "true").returncode == 0
    shown = cpulaunch("logs")
    assert (shown.returncode, shown.stdout) == (0, "")
    assert shown.stderr.endswith("cpulaunch: the ranks have printed nothing\n")


def test_requesting_a_rank_that_the_job_lacks_is_an_error(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_bytes(b"one\n")
    (tmp_path / "plan.json").write_text('{"world_size": 2}')
    done = cpulaunch("logs", "--rank", "1,7", ".")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the job in . has no rank 7\n" in done.stderr
    assert "hint: it has ranks 0-1\n" in done.stderr
    assert cpulaunch("logs", "--rank", "0", ".").stdout == "one\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "no running job of yours, and no job in runs/"),
        (["20261122"], "20261122: no such job"),
        (["."], ".: contains no job"),
        (["--rank", "x"], "--rank x: expected ranks, such as"),
    ],
)
def test_a_job_that_does_not_exist_is_an_error(
    cpulaunch: Run, tmp_path: Path, arguments: list[str], error: str
) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    done = cpulaunch("logs", *arguments, env=env)
    assert done.returncode == 2
    assert error in done.stderr
