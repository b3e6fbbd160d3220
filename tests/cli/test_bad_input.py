"""Invalid input is refused with a clear error, and odd input gives a warning."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run, mpi_options
from support.jobs import outputs


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere.py"], 2, "nowhere.py: no such script"),
        (["-n", "2", "sh", "-c", "true"], 2, "hint: did you mean --no-python sh?"),
        (["package.train"], 2, "hint: did you mean -m package.train?"),
        (["directory"], 2, "directory is a directory, not a script"),
        (["pipe"], 2, "pipe is a pipe, which only one of the ranks could read"),
        ([], 2, "no script to run"),
        ([""], 2, "no script to run"),
        (["--wdir", "", "show.py"], 2, "--wdir needs a value: DIR"),
        (["--wdir=", "show.py"], 2, "--wdir needs a value: DIR"),
        (["-m"], 2, "no script to run"),
        (["--no-python", "no-such-program"], 2, "no-such-program: no such program"),
        (["--no-python", "./show.py"], 2, "not executable"),
        (["-n", "2", "python", "show.py"], 2, "type: cpulaunch run -n 2 show.py"),
        (["--format", "shell", "show.py"], 2, "--format is for --dry-run"),
        (
            ["--hosts", "localhost,127.0.0.1", "show.py"],
            2,
            "localhost and 127.0.0.1 are both this machine",
        ),
        (["-n", "1", "--interface", "eth99", "show.py"], 2, "this machine has no interface eth99"),
        (["--lscpu", "nowhere", "show.py"], 2, "error: nowhere: cannot be read"),
        (["-n"], 2, "-n needs a value"),
        (["-n", "two", "show.py"], 2, "-n: 'two' is not valid for hosts.nproc"),
        (["-f", "nowhere", "show.py"], 2, "hostfile nowhere: cannot be read: No such file"),
        (["-f", "empty", "show.py"], 2, "hostfile empty: names no host"),
        (["-f", "malformed", "show.py"], 2, "malformed:2: 'junk' after the host 'b'"),
        (["-f", "two", "-n", "3", "show.py"], 2, "3 ranks can't be divided evenly over 2 hosts"),
        (["-f", "two", "--hosts", "a", "show.py"], 2, "both name hosts"),
        (["--exclude", "a", "show.py"], 2, "hosts.exclude (--exclude): the job runs only on this machine"),
        (["-n", "4096", "show.py"], 2, "--oversubscribe"),
        (["--mpi", "openmpi", "--mpi-path", ".", "show.py"], 2, "no mpiexec of openmpi"),
        (["--mpi-path", "nowhere", "show.py"], 2, "no MPI was found in nowhere"),
        (["--tee", "5", "-n", "2", "show.py"], 2, "--tee 5: the ranks are 0 to 1"),
        (["--dry-run", "--tee", "5", "-n", "2", "show.py"], 2, "--tee 5: the ranks are 0 to 1"),
        (["--set", "launcher", "show.py"], 2, "expected KEY=VALUE"),
        (["-x", "NOT_SET_ANYWHERE", "show.py"], 2, "NOT_SET_ANYWHERE is not set"),
        (["--facts", "show.py", "--dry-run", "show.py"], 2, "show.py:2: not JSON"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_invalid_input_is_refused_with_a_clear_error(cpulaunch: Run, show, arguments, code, said) -> None:
    directory = show.parent
    (directory / "directory").mkdir()
    os.mkfifo(directory / "pipe")
    (directory / "empty").write_text("# nobody\n\n")
    (directory / "malformed").write_text("a\nb junk\n")
    (directory / "two").write_text("a\nb\n")
    done = cpulaunch("run", *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


LONG = "a" * 300


@pytest.mark.parametrize(
    "command",
    [
        f"run {LONG}.py",
        f"run --wdir {LONG} show.py",
        f"run --dry-run --mpi-path {LONG} show.py",
        f"tune -o {LONG} show.py",
        f"config --defaults --config-file {LONG}",
    ],
    ids=lambda command: command.replace(LONG, "L"),
)
def test_a_name_that_is_too_long_is_refused_in_one_line(cpulaunch: Run, show, command: str) -> None:
    done = cpulaunch(*command.split())
    assert (done.returncode, done.stdout) == (2, "")
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"cpulaunch: error: {LONG}")
    assert error.endswith(": File name too long")


@pytest.mark.parametrize(
    "command",
    [
        "submit --to slurm --nodes 1 --output loop --dry-run show.py",
        "config --defaults --config-file loop",
        "config import -o loop default.yaml",
        "hosts check --facts-out loop",
    ],
)
def test_an_output_file_that_is_a_link_to_itself_is_refused(cpulaunch: Run, show, command: str) -> None:
    (link := show.parent / "loop").symlink_to("loop")
    (show.parent / "default.yaml").write_text("distributed_type: MULTI_CPU\n")
    done = cpulaunch(*command.split())
    error = done.stderr.splitlines()[-2 if "hint" in done.stderr else -1]
    assert done.returncode == 2
    assert error.startswith("cpulaunch: error: loop: cannot be ")
    assert error.endswith(": Too many levels of symbolic links")
    assert (link.is_symlink(), sorted(show.parent.glob(".loop*"))) == (True, [])


@pytest.mark.parametrize(
    ("command", "missing"),
    [("hosts", "no command; its commands: check"), ("ccl", "no command; its commands: build, info")],
)
def test_a_command_without_its_subcommand_lists_the_subcommands(
    cpulaunch: Run, command: str, missing: str
) -> None:
    done = cpulaunch(command)
    assert (done.returncode, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert error == f"cpulaunch: error: {command}: {missing}"
    assert hint.startswith(f"cpulaunch: hint: `cpulaunch {command} ")
    shown = cpulaunch(command, "--help")
    assert (shown.returncode, shown.stdout.startswith("usage: ")) == (0, True)


def test_a_missing_engine_gives_a_warning(cpulaunch: Run, show) -> None:
    pytest.importorskip("torch")
    done = cpulaunch("run", "-n", "1", "--dry-run", "--engine", "ipex", "show.py")
    assert ("intel_extension_for_pytorch is not installed" in done.stderr) == (
        find_spec("intel_extension_for_pytorch") is None
    )


def test_without_a_compiler_gloo_is_chosen_with_a_message(cpulaunch: Run, show) -> None:
    env = {"XDG_CACHE_HOME": str(show.parent), "CXX": "no-such-compiler"}
    dry = cpulaunch("run", "-n", "1", "--dry-run", "show.py", env=env)
    run = cpulaunch("run", "-n", "1", "show.py", env=env)
    for text in (dry.stdout, run.stderr):
        assert "backend gloo, as ccl can't be used: no C++ compiler: there is no 'no-such-compiler'" in text


def test_more_threads_than_cores_give_a_warning(cpulaunch: Run, show) -> None:
    done = cpulaunch("run", "-n", "1", "--dry-run", "show.py", env={"OMP_NUM_THREADS": "1000"})
    assert "warning: cpu.threads ($OMP_NUM_THREADS): 1000 threads per rank of" in done.stderr


@pytest.mark.parametrize(("locale", "dot"), [("C", " - "), ("C.UTF-8", " · ")])
def test_the_first_line_suits_the_locale(cpulaunch: Run, show, locale: str, dot: str) -> None:
    done = cpulaunch("run", "-n", "1", "show.py", env={"LC_ALL": locale})
    line = next(line for line in done.stderr.splitlines() if "logs in" in line)
    assert dot + "started directly" + dot in line
    assert line.isascii() == (locale == "C")


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_deleted_working_directory_is_refused(command: str, tmp_path) -> None:
    code = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -m cpulaunch {command} train.py"
    done = subprocess.run(["sh", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2
    assert "the working directory has been deleted" in done.stderr


def test_an_unreadable_script_is_refused(tmp_path) -> None:
    script = tmp_path / "secret.py"
    script.write_text("")
    script.chmod(0)
    # Root can read everything, so switch to another user.
    code = (
        "import os, pathlib, cpulaunch.cli.run.command as run; os.getuid() or os.setuid(65534);"
        "run._check_script(pathlib.Path(), 'secret.py')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert "UsageError: secret.py: cannot be read: Permission denied" in done.stderr


@pytest.mark.parametrize(
    "hosts", [[], ["--hosts", socket.gethostname()]], ids=["no hosts", "this host's name"]
)
def test_a_busy_master_port_is_refused(cpulaunch: Run, show, busy_port: int, hosts: list[str]) -> None:
    done = cpulaunch("run", "-n", "2", *hosts, "--master-port", busy_port, "show.py")
    assert done.returncode == 3
    assert f"port {busy_port} of 127.0.0.1: Address already in use" in done.stderr


def test_more_ranks_than_cores_run_with_oversubscribe(cpulaunch: Run, show) -> None:
    ranks = len(os.sched_getaffinity(0)) + 1
    assert "--oversubscribe" in cpulaunch("run", "-n", ranks, "show.py").stderr
    assert len(outputs(cpulaunch("run", "-n", ranks, "--oversubscribe", "show.py"))) == ranks


@pytest.mark.parametrize("flavour", ["intel", pytest.param("openmpi", marks=pytest.mark.slow)])
def test_oversubscribing_works_with_an_mpi(cpulaunch: Run, show, flavour) -> None:
    ranks = len(os.sched_getaffinity(0)) + 1
    done = cpulaunch("run", "-n", ranks, "--oversubscribe", *mpi_options(flavour), "show.py")
    assert len(outputs(done)) == ranks


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield s.getsockname()[1]


@pytest.mark.parametrize("port", ["auto", "29513"])
@pytest.mark.parametrize(
    ("address", "why", "hint"),
    [
        ("192.0.2.7", "192.0.2.7 is not an address of this machine", "it has 127.0.0.1"),
        ("no such host", "no such host: ", "omit it to use 127.0.0.1"),
    ],
)
def test_ranks_can_meet_only_at_an_address_of_this_machine(
    cpulaunch: Run, tmp_path: Path, port: str, address: str, why: str, hint: str
) -> None:
    """At another address, they would wait for each other until torch's timeout of half an hour."""
    (tmp_path / "train.py").write_text("")
    done = cpulaunch("run", "-n", "2", "--master-addr", address, "--master-port", port, "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    error, told = done.stderr.splitlines()
    assert error.startswith(f"cpulaunch: error: hosts.master_addr (--master-addr): {why}")
    assert told.startswith("cpulaunch: hint: ")
    assert hint in told
    assert not (tmp_path / "runs").exists()
