"""How `cpulaunch run` shows and logs the output of the ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.command import TIMEOUT, Run, bounded, clean_environment
from support.marks import usually_under

from cli.conftest import popen


class TestOutput:
    def test_lines_of_ranks_never_mix_and_none_is_lost(self, cpulaunch: Run, tmp_path) -> None:
        (tmp_path / "talk.py").write_text(
            "import os, sys\nr = os.environ['RANK']\n"
            "for i in range(20000): print(r * 50, i)\n"
            "sys.stderr.write('end ' + r)\n"
        )
        done = cpulaunch("run", "-n", "2", "talk.py")
        for rank in "01":
            mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
            assert mine == [f"[{rank}] {rank * 50} {i}" for i in range(20000)]
            assert f"[{rank}] end {rank}\n" in done.stderr
            (log,) = tmp_path.glob(f"runs/*/rank-{rank}.log")
            assert log.read_text() == "".join(f"{rank * 50} {i}\n" for i in range(20000)) + f"end {rank}"

    def test_output_of_a_single_rank_has_no_prefix_and_may_be_binary(self, cpulaunch: Run, tmp_path) -> None:
        (tmp_path / "binary.py").write_text("import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000)")
        done = cpulaunch("run", "-n", "2", "--tee", "1", "binary.py", text=False)
        assert done.stdout == bytes(range(256)) * 1000
        assert next(tmp_path.glob("runs/*/rank-0.log")).read_bytes() == bytes(range(256)) * 1000

    def test_tee_none_shows_nothing_but_keeps_logs(self, cpulaunch: Run, show) -> None:
        done = cpulaunch("run", "-n", "2", "--tee", "none", "show.py")
        assert (done.returncode, done.stdout) == (0, "")
        logs = list(show.parent.glob("runs/*/rank-?.log"))
        assert [log.stat().st_size > 0 for log in logs] == [True, True]

    def test_huge_and_unterminated_lines_do_no_harm(self, cpulaunch: Run, tmp_path) -> None:
        (tmp_path / "long.py").write_text("print('x' * 10_000_000); print('end', end='')")
        done = cpulaunch("run", "-n", "2", "--tee", "all", "long.py")
        assert done.returncode == 0
        assert done.stdout.count("x") == 20_000_000
        assert all(line[:4] in ("[0] ", "[1] ") for line in done.stdout.splitlines())
        assert done.stdout.count("end") == 2

    def test_a_job_continues_if_nobody_reads_its_output_any_more(self, marked, tmp_path) -> None:
        (tmp_path / "count.py").write_text("for number in range(100_000): print(number)")
        with bounded(popen(tmp_path, marked, "run", "-n", "1", "count.py")) as launcher:
            assert launcher.stdout
            assert launcher.stdout.readline() == "0\n"
            launcher.stdout.close()
            assert launcher.wait(TIMEOUT) == 0
        (log,) = tmp_path.glob("runs/*/rank-0.log")
        assert log.read_text().splitlines() == [str(number) for number in range(100_000)]

    def test_an_unwritable_log_directory_gives_a_warning(self, cpulaunch: Run, show, tmp_path) -> None:
        (tmp_path / "file").write_text("")
        done = cpulaunch("run", "-n", "2", "--log-dir", "file", "show.py", env={"TMPDIR": str(tmp_path)})
        assert done.returncode == 0
        assert done.stderr.count("can't be written") == 1

    @usually_under("local", "intel")
    def test_stdin_goes_to_rank_0(self, launcher_options, tmp_path) -> None:
        if "openmpi" in launcher_options:
            pytest.skip("Open MPI's mpiexec never tells rank 0 that its stdin has ended")
        (tmp_path / "read.py").write_text("import sys; print(repr(sys.stdin.read()))")
        done = subprocess.run(
            [sys.executable, "-m", "cpulaunch", "run", "-n", "2", *launcher_options, "read.py"],
            cwd=tmp_path,
            input="hello",
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
            env=clean_environment(),
        )
        assert sorted(done.stdout.splitlines()) == ["[0] 'hello'", "[1] ''"]
