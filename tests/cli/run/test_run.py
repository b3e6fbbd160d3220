"""`cpulaunch run` with real ranks, started directly and by the mpiexec of three MPIs."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from support import programs
from support.command import (
    TIMEOUT,
    Run,
    clean_environment,
    mpiexec_after,
    processes_with,
)
from support.jobs import box, job, outcome, outputs
from support.marks import by_launcher, usually_under

from cpulaunch.launchers import MPIS

NASTY = [
    "a b",
    "it's",
    'say "hi"',
    "new\nline",
    "$HOME",
    "; ls",
    "*",
    "é ☃",
    "",
    ":",
    "\\:",
    "\\",
    "--help",
    "-x",
    "a=b",
]

LAUNCHERS = ("local", *MPIS)
FAILURES = [
    ("raise", 1, "error", "ValueError: no such luck"),
    ("exit", 3, "exit", "exit code 3"),
    ("message", 1, "exit", "exit code 1"),
    ("_exit", 4, "exit", "exit code 4"),
    ("9", 137, "signal", "SIGKILL"),
    ("11", 139, "signal", "SIGSEGV"),
    ("abort", 134, "signal", "SIGABRT"),
]
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class TestEveryLauncher:
    def test_ranks_get_their_numbers_and_the_planned_cores(
        self, cpulaunch: Run, launcher_options, show
    ) -> None:
        ranks = outputs(cpulaunch("run", "-n", "2", *launcher_options, "show.py", "--lr", "0.1"))
        assert [r["env"]["RANK"] for r in ranks] == ["0", "1"]
        assert [r["env"]["LOCAL_RANK"] for r in ranks] == ["0", "1"]
        for r in ranks:
            env = r["env"]
            assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == ("2", "2", "0")
            assert (env["MASTER_ADDR"], env["CPULAUNCH_RESTART_COUNT"]) == ("127.0.0.1", "0")
            assert int(env["MASTER_PORT"]) > 1023
            assert env["CPULAUNCH_TOKEN"] is None
            assert env["CPULAUNCH_PLACEMENT"] is None
            assert len(r["cpus"]) == int(env["OMP_NUM_THREADS"])
            assert r["argv"] == ["show.py", "--lr", "0.1"]
            assert r["name"] == "__main__"
            assert r["path0"] == r["cwd"] == str(show.parent)
        (key,) = {r["env"]["CPULAUNCH_GROUPS_KEY"] for r in ranks}
        assert len(bytes.fromhex(key)) == 32
        assert not set(ranks[0]["cpus"]) & set(ranks[1]["cpus"])
        plan = json.loads(next(show.parent.glob("runs/*/plan.json")).read_text())
        planned = [rank["cores"] for rank in plan["hosts"][0]["ranks"]]
        assert [",".join(map(str, r["cpus"])) for r in ranks] == [
            ",".join(unfolded(cores)) for cores in planned
        ]

    @usually_under("local", "openmpi")
    def test_names_arguments_and_variables_reach_every_rank_unchanged(
        self, cpulaunch: Run, launcher_options, show, tmp_path
    ) -> None:
        (directory := tmp_path / "dir $x; 'q' é").mkdir()
        odd = show.rename(directory / "odd $name; é '\".py")
        value = "two words\n$x é"
        env = {"FORWARDED": value, "INHERITED": "yes"}
        options = ("-n", "2", *launcher_options, "--env", f"GIVEN={value}", "-x", "FORWARDED")
        for r in outputs(cpulaunch("run", *options, odd.name, *NASTY, cwd=directory, env=env)):
            assert r["argv"] == [odd.name, *NASTY]
            assert r["cwd"] == str(directory)
            assert [r["env"][n] for n in ("GIVEN", "FORWARDED", "INHERITED")] == [value, value, "yes"]

    @usually_under("local", "mpich")
    def test_modules_and_other_programs_run(self, cpulaunch: Run, launcher_options, tmp_path) -> None:
        package = tmp_path / "pack"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "train.py").write_text(programs.SHOW)
        for r in outputs(cpulaunch("run", "-n", "2", *launcher_options, "-m", "pack.train", "-m", "x")):
            assert r["argv"] == [str(package / "train.py"), "-m", "x"]
            assert r["path0"] == str(tmp_path)
        done = cpulaunch(
            "run", "-n", "2", *launcher_options, "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE", "x"
        )
        assert sorted(done.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]

    @pytest.mark.parametrize(
        ("launcher_options", "how", "code", "kind", "said"),
        by_launcher(
            [(name, *failure) for name in LAUNCHERS for failure in FAILURES],
            usual=[(mpi, *failure) for mpi, failure in zip(MPIS, FAILURES[::2], strict=False)],
        ),
        indirect=["launcher_options"],
    )
    def test_a_failed_rank_is_named_and_the_job_has_its_exit_code(
        self, cpulaunch: Run, launcher_options, fail, marked, how, code, kind, said
    ) -> None:
        done = cpulaunch("run", "-n", "2", *launcher_options, "fail.py", how, env=marked)
        assert done.returncode == code, done.stderr
        title, lines = box(done.stderr)
        assert title == "rank 1 on localhost failed first"
        assert lines[0].startswith(said)
        assert done.stderr.splitlines()[-1] == "cpulaunch: 1 other rank (0): ended by launcher"
        result = outcome(fail.parent)
        assert (result["exit_code"], result["kind"]) == (code, kind)
        first = result["first_failure"]
        assert (first["rank"], first["host"]) == (1, "localhost")
        if kind == "error":
            assert (first["error"], first["file"], first["line"]) == (said, "fail.py", 7)
            assert [line for line in lines if line.startswith("  File")] == [
                f'  File "{fail}", line 7, in <module>'
            ]
            assert done.stderr.count("Traceback") == 1
            (log,) = fail.parent.glob("runs/*/rank-1.log")
            assert log.read_text().count("Traceback") == 1
        elif kind == "signal":
            assert (first["signal"], first["exit_code"]) == (code - 128, None)
        else:
            assert (first["signal"], first["exit_code"]) == (None, code)
        assert [r["status"] for r in result["ranks"]][0] == "ended by launcher"

    @pytest.mark.parametrize(
        ("launcher_options", "number"),
        by_launcher(itertools.product(LAUNCHERS, SIGNALS), usual=[*zip(MPIS, SIGNALS, strict=True)]),
        indirect=["launcher_options"],
    )
    def test_a_signal_ends_all_processes_even_if_the_program_ignores_it(
        self, launcher_options, marked, tmp_path, number
    ) -> None:
        with job(tmp_path, marked, launcher_options, programs.FAMILY, "--grace-period", "0.5") as launcher:
            launcher.send_signal(number)
            assert launcher.wait(TIMEOUT) == 128 + number
        assert processes_with(f"TEST_MARK={tmp_path}") == []
        assert outcome(tmp_path)["kind"] == "interrupted"

    @usually_under("local", "openmpi")
    def test_a_killed_launcher_leaves_no_processes(self, launcher_options, marked, tmp_path) -> None:
        with job(tmp_path, marked, launcher_options, programs.FAMILY, "--grace-period", "0.5") as launcher:
            launcher.kill()
            launcher.wait(TIMEOUT)
            wait_until_gone(marked)

    @pytest.mark.parametrize(
        ("launcher_options", "sh"),
        by_launcher(itertools.product(LAUNCHERS, ("bash", "sh")), [("mpich", "bash")]),
        indirect=["launcher_options"],
    )
    def test_the_pasted_shell_form_runs(self, cpulaunch: Run, launcher_options, show, sh: str) -> None:
        script = cpulaunch(
            "run", "-n", "2", *launcher_options, "--dry-run", "--format", "shell", "show.py", *NASTY
        ).stdout
        done = shell(script, show.parent, sh)
        assert {tuple(r["argv"]) for r in outputs(done)} == {("show.py", *NASTY)}

    @usually_under("local")
    def test_the_pasted_shell_form_fails_if_a_rank_fails(
        self, cpulaunch: Run, launcher_options, tmp_path
    ) -> None:
        (tmp_path / "five.py").write_text("import sys; sys.exit(5)")
        script = cpulaunch(
            "run", "-n", "2", *launcher_options, "--dry-run", "--format", "shell", "five.py"
        ).stdout
        assert shell(script, tmp_path).returncode != 0


def shell(script: str, directory: Path, sh: str = "sh", **env: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script."""
    return subprocess.run(
        [sh, "-c", script], cwd=directory, env=clean_environment(**env), capture_output=True, text=True,
        timeout=TIMEOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


WAIT_UNTIL_GONE = """
import pathlib, sys, time
def there():
    for entry in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if sys.argv[1].encode() in entry.read_bytes().split(b"\\0"): return True
        except OSError: pass
while there(): time.sleep(0.05)
"""


def wait_until_gone(mark: dict[str, str]) -> None:
    """Wait until all processes with ``mark`` in their environment have ended."""
    ((name, value),) = mark.items()
    command = [sys.executable, "-c", WAIT_UNTIL_GONE, f"{name}={value}"]
    subprocess.run(command, env=clean_environment(), timeout=TIMEOUT, check=True)


class TestLauncherInOddPlaces:
    def test_under_nohup_a_hangup_is_ignored(self, marked, tmp_path) -> None:
        program = (
            "import pathlib, time\nprint('ready')\nwhile not pathlib.Path('go').exists(): time.sleep(0.02)\n"
        )
        with job(tmp_path, marked, [], program, wrapper=["nohup"]) as launcher:
            launcher.send_signal(signal.SIGHUP)
            (tmp_path / "go").touch()
            assert launcher.wait(TIMEOUT) == 0

    def test_a_closed_terminal_ends_the_job(self, marked, tmp_path) -> None:
        (tmp_path / "sleep.py").write_text(
            "import os, time; print('ready', os.environ['RANK']); time.sleep(300)"
        )
        launcher = pexpect.spawn(
            sys.executable,
            ["-m", "cpulaunch", "run", "-n", "2", "--grace-period", "1", "sleep.py"],
            cwd=str(tmp_path),
            env=clean_environment(**marked),
            timeout=TIMEOUT,
        )
        launcher.expect(r"\[[01]\] ready")
        launcher.expect(r"\[[01]\] ready")
        launcher.close(force=False)  # sends SIGHUP, and waits briefly
        wait_until_gone(marked)

    @pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
    def test_closed_streams_do_no_harm(self, show, closed: str) -> None:
        command = f"exec {sys.executable} -m cpulaunch run -n 2 show.py {closed}"
        done = shell(command, show.parent)
        assert done.returncode == 0, done.stderr
        assert "cpulaunch:" not in done.stdout
        assert all(log.stat().st_size for log in show.parent.glob("runs/*/rank-?.log"))

    @pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>/dev/full"])
    def test_the_exit_code_is_the_ranks_even_if_the_report_cannot_be_printed(
        self, tmp_path, closed: str
    ) -> None:
        command = f"exec {sys.executable} -m cpulaunch run -n 2 --no-python sh -c 'exit 4' {closed}"
        assert shell(command, tmp_path).returncode == 4

    def test_a_closed_output_pipe_does_not_end_the_job(self, marked, show) -> None:
        command = f"{sys.executable} -m cpulaunch run -n 2 show.py 2>&1 | true"
        shell(command, show.parent, **marked)
        wait_until_gone(marked)
        assert outcome(show.parent)["kind"] == "ok"

    def test_an_argument_that_is_not_utf8_reaches_the_program(self, tmp_path) -> None:
        (tmp_path / "bytes.py").write_text("import os, sys; print(os.fsencode(sys.argv[1]))")
        command = [sys.executable, "-m", "cpulaunch", "run", "-n", "1", "bytes.py", b"\xff"]
        done = subprocess.run(
            command, cwd=tmp_path, env=clean_environment(), capture_output=True, timeout=TIMEOUT
        )
        assert done.stdout == b"b'\\xff'\n", done.stderr

    def test_an_mpiexec_that_starts_no_ranks_is_a_failure(self, cpulaunch: Run, show) -> None:
        done = cpulaunch("run", "-n", "2", "--mpi", "intel", "--mpi-args=--version", "show.py")
        assert done.returncode == 3
        assert outcome(show.parent)["kind"] == "start_failed"


class TestSlurmShell:
    @usually_under("local", "openmpi")
    def test_variables_of_slurm_and_other_launchers_do_not_confuse_a_run(
        self, cpulaunch: Run, launcher_options, show
    ) -> None:
        env = {
            "SLURM_PROCID": "5",
            "SLURM_NTASKS": "8",
            "SLURM_LOCALID": "3",
            "SLURM_JOB_ID": "77",
            "PMI_RANK": "6",
            "OMPI_COMM_WORLD_RANK": "4",
            "RANK": "9",
            "WORLD_SIZE": "10",
        }
        done = cpulaunch("run", "-n", "2", *launcher_options, "-x", "SLURM_NTASKS", "show.py", env=env)
        for rank, seen in enumerate(each["env"] for each in outputs(done)):
            assert (seen["RANK"], seen["WORLD_SIZE"]) == (str(rank), "2")
            assert (seen["SLURM_PROCID"], seen["SLURM_NTASKS"], seen["SLURM_JOB_ID"]) == (None, "8", "77")
            assert seen["PMI_RANK"] in (None, str(rank))
            assert seen["OMPI_COMM_WORLD_RANK"] in (None, str(rank))


def test_hydras_needless_topology_warning_appears_only_in_its_log(cpulaunch: Run, show) -> None:
    said = "IPL WARN> no such node\nall else\nIPL WARN> again"
    options = mpiexec_after(show.parent, f"echo '{said}' >&2; exec")
    done = cpulaunch("run", "-n", "2", *options, "show.py")
    assert "all else" in done.stderr.splitlines()
    assert "IPL WARN" not in done.stderr
    (log,) = show.parent.glob("runs/*/launcher.log")
    assert said in log.read_text()


def test_files_that_may_hold_secrets_are_private(cpulaunch: Run, show) -> None:
    """mpiexec's log is such a file: its debug output includes the environment."""
    options = mpiexec_after(show.parent, "echo SECRET=1; exec")
    assert cpulaunch("run", "-n", "2", *options, "show.py").returncode == 0
    (directory,) = show.parent.glob("runs/*")
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {
        "plan.json",
        "command.sh",
        "launcher.log",
    }


def test_with_as_written_the_headline_shows_no_planned_precision(cpulaunch: Run, show: Path) -> None:
    done = cpulaunch("run", "-n", "1", "--as-written", "show.py")
    assert re.search(r"1 rank on this machine, \d+ threads? · as written · started directly", done.stderr)
    assert "bf16" not in done.stderr


class TestPlacement:
    def test_a_rank_that_may_not_use_its_cores_fails_the_job(self, cpulaunch: Run, show) -> None:
        """The plan uses all CPUs, but mpiexec starts the ranks with fewer."""
        options = mpiexec_after(show.parent, "exec taskset -c 0")
        done = cpulaunch("run", "-n", "2", *options, "show.py")
        assert done.returncode == 3
        assert "is planned on CPUs" in done.stderr
        assert "may use only 0" in done.stderr
        assert outcome(show.parent)["kind"] == "start_failed"


def unfolded(cores: str) -> Iterator[str]:
    for part in cores.split(","):
        first, _, last = part.partition("-")
        yield from map(str, range(int(first), int(last or first) + 1))
