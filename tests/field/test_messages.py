"""For common mistakes and refusals by the machine, messages say what is wrong and what to do."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run, clean_environment
from support.terminal import Terminal

GLOO = ("--backend", "gloo", "--precision", "fp32")


@pytest.mark.parametrize("more", [(":", "-n", "2", "b.py"), ("x", ":", "--host", "b", "b.py")])
def test_a_second_program_is_refused(more: Sequence[str], cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    done = cpulaunch("run", "-n", "2", "--dry-run", "a.py", *more)
    assert done.returncode == 2
    assert "a job runs one program, so these would be arguments of a.py" in done.stderr


@pytest.mark.parametrize("more", [(":",), (":", "x"), ("a:b", "-n", "2")])
def test_a_colon_may_be_an_argument(more: Sequence[str], cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    assert cpulaunch("run", "-n", "1", *GLOO, "--dry-run", "a.py", *more).returncode == 0


def test_a_script_on_stdin_is_refused(cpulaunch: Run) -> None:
    done = cpulaunch("run", "-n", "2", "-")
    assert done.returncode == 2
    assert "only one of the ranks could read" in done.stderr


@pytest.mark.parametrize("hosts", ["a,,b", "a,b,"])
def test_a_superfluous_comma_is_reported(hosts: str, cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    done = cpulaunch("run", "--hosts", hosts, "--dry-run", "a.py")
    assert done.returncode == 2
    assert f"--hosts: '{hosts}' has a superfluous comma" in done.stderr


def test_the_hint_for_an_ipv6_host_is_a_valid_option(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    assert "takes: [::1]:2\n" in cpulaunch("run", "--hosts", "::1,::1", "--dry-run", "a.py").stderr
    assert cpulaunch("run", "--hosts", "[::1]:2", *GLOO, "--dry-run", "a.py").returncode == 0


@pytest.mark.parametrize("name", ["RANK", "LOCAL_WORLD_SIZE"])
def test_a_variable_that_differs_between_ranks_cannot_be_set(
    name: str, cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("")
    done = cpulaunch("run", "-n", "2", "--env", f"{name}=7", *GLOO, "--oversubscribe", "--dry-run", "a.py")
    assert done.returncode == 2
    assert f"(--env): {name} can't be set" in done.stderr


def test_arguments_for_an_unused_mpiexec_give_a_message(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    done = cpulaunch("run", "-n", "1", "--mpi-args=-foo", *GLOO, "a.py")
    assert done.returncode == 0
    assert "(--mpi-args): has no effect, because no mpiexec starts the ranks" in done.stderr


def test_an_option_that_takes_no_value_is_refused_with_a_value(cpulaunch: Run) -> None:
    done = cpulaunch("run", "--verbose=3", "a.py")
    assert done.returncode == 2
    assert "--verbose takes no value, got '3'" in done.stderr


@pytest.mark.parametrize("last", [9999, 1000000])
def test_the_error_for_missing_cores_names_the_existing_cores(
    last: int, cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("")
    done = cpulaunch("run", "--cores", f"0-{last}", *GLOO, "--dry-run", "a.py")
    assert done.returncode == 2
    assert str(max(os.sched_getaffinity(0))) in done.stderr
    assert "is not valid" not in done.stderr


# Installs a filter that refuses the system call sched_setaffinity, as containers do, and runs a command.
FILTERED = """
import ctypes, os, struct, sys
number = {"x86_64": 203, "aarch64": 122}[os.uname().machine]
load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
steps = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, 0x00050000 | 1), (give, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP, a filter
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of system calls")
@pytest.mark.parametrize("lenient", [False, True])
def test_a_refused_cpu_affinity_is_an_error_unless_lenient(lenient: bool, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('ran')")
    words = ["run", "-n", "1", *GLOO, *(["--lenient"] if lenient else []), "a.py"]
    done = subprocess.run(
        [sys.executable, "-c", FILTERED, sys.executable, "-m", "cpulaunch", *words],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "can't be put on CPUs" in done.stderr
    assert (done.returncode == 0, "ran" in done.stdout) == (lenient, lenient), done.stderr
    assert "--lenient" in done.stderr or lenient


def test_the_plan_of_a_non_python_program_has_no_backend_or_precision(cpulaunch: Run, tmp_path: Path) -> None:
    done = cpulaunch("run", "-n", "1", "--no-python", "true")
    assert done.returncode == 0
    assert "1 rank on this machine" in done.stderr
    assert not any(word in done.stderr for word in ("planned", "bf16", "ccl"))


def test_a_terminal_shows_equal_lines_of_two_ranks_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('the same line', flush=True)")
    job = [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--oversubscribe", *GLOO, "a.py"]
    shown = Terminal(tmp_path, clean_environment(TERM="dumb"), job)
    try:
        assert shown.ends() == 0
    finally:
        shown.close()
    assert shown.text.count("the same line") in (1, 2)  # 2 if a rank printed much later
    if shown.text.count("the same line") == 1:
        assert "[0-1] the same line" in shown.text


FIXED_PORT = """
import os, sys
import torch.distributed as dist
os.environ["MASTER_PORT"] = sys.argv[1]
dist.init_process_group("gloo")
"""


def test_the_error_for_a_port_in_use_says_that_the_script_chose_it(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(FIXED_PORT)
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = cpulaunch("run", "-n", "1", *GLOO, "a.py", port)
    assert done.returncode == 1
    assert f"port {port}, which the script has chosen, is in use" in done.stderr
    assert cpulaunch("run", "-n", "1", *GLOO, "a.py", port).returncode == 0


def test_a_missing_module_is_reported_with_its_import(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("import nosuch")
    (tmp_path / "pkg/train.py").touch()
    done = cpulaunch("run", "-n", "1", *GLOO, "-m", "pkg.train")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'nosuch'" in done.stderr
    assert "at pkg/__init__.py:1" in done.stderr
    assert "direct cause" not in done.stderr


@pytest.mark.parametrize(
    ("option", "script", "said"),
    [
        ("-n", "print('ran')", True),
        ("--nproc_per_node", "print('ran')", True),
        ("--lr", "print('ran')", False),
        ("-n", "import sys; print('ran', len(sys.argv))", False),
        ("-n", "import click; print('ran')", False),
    ],
)
def test_an_option_after_a_script_without_arguments_gives_a_message(
    option: str, script: str, said: bool, cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(script)
    done = cpulaunch("run", "-n", "1", "--dry-run", "a.py", option, "2")
    assert done.returncode == 0
    line = f"cpulaunch: {option} came after the script, so the script got it: "
    assert (line in done.stderr) is said, done.stderr


@pytest.mark.parametrize(("option", "said"), [("-demux", True), ("--nod", False), ("--frobnicate", False)])
def test_mpi_args_is_suggested_only_for_options_of_mpiexec(option: str, said: bool, cpulaunch: Run) -> None:
    done = cpulaunch("run", option, "a.py")
    assert done.returncode == 2
    assert ("--mpi-args=WORD" in done.stderr) is said, done.stderr
