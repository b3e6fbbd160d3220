"""`cpulaunch env` reports what is installed, what would be used, and why."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import Run
from support.marks import repeat
from support.packages import stand_in

from cpulaunch import __version__
from cpulaunch.ccl.installed import Built, state


def report(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Return the texts in the report by their labels."""
    assert done.returncode == 0, done.stderr
    lines: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        lines.setdefault(line[:16].strip(), []).append(line[17:])
    return lines


def test_versions_machine_and_mpi_are_named(cpulaunch: Run) -> None:
    lines = report(cpulaunch("env"))
    assert lines["cpulaunch"][0].startswith(f"{__version__}, ")
    assert lines["python"][0].endswith(sys.executable)
    assert lines["torch"] == [str(state().torch)]
    assert "cores that this process may use" in lines["CPU"][0]
    assert any(text.startswith("lo 127.0.0.1") for text in lines["interfaces"])
    assert "MPI" in lines
    assert "setting" not in lines


def test_variables_and_settings_are_shown_without_secrets(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "cpulaunch.yaml").write_text(
        "cpulaunch: 1\nccl: {worker_count: 2}\nenv: {PASSWORD: hunter2}\n"
    )
    set_here = {"CCL_ALLREDUCE": "ring", "FI_TOKEN": "hunter3", "UNRELATED": "hunter4"}
    done = cpulaunch("env", env=set_here)
    lines = report(done)
    assert lines["variable"] == ["CCL_ALLREDUCE=ring", "FI_TOKEN=…"]
    assert "ccl.worker_count: 2 (cpulaunch.yaml:2)" in lines["setting"]
    assert "hunter" not in done.stdout


def test_cpulaunchs_own_process_group_is_the_default(cpulaunch: Run, built: Built) -> None:
    assert report(cpulaunch("env"))["used for ccl"] == [f"{built.module} ({built.layer.origin})"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "binding", "used"),
    [
        ("same", "oneccl_bind_pt", "oneccl_bind_pt .*"),
        repeat("same", "auto", ".*_group.so .*"),
        repeat("2.1.0", "oneccl_bind_pt", "nothing: oneccl_bind_pt 2.1.0 is not for torch .*"),
    ],
)
def test_the_binding_in_use_is_named(
    cpulaunch: Run, tmp_path: Path, built: Built, version: str, binding: str, used: str
) -> None:
    there = stand_in(tmp_path, "", built.torch if version == "same" else version)
    (text,) = report(cpulaunch("env", "--ccl-binding", binding, env=there))["used for ccl"]
    assert re.fullmatch(used, text)


@pytest.mark.slow
def test_env_can_check_hosts_too(cpulaunch: Run) -> None:
    done = cpulaunch("env", "--hosts", "localhost")
    assert done.returncode == 0, done.stderr
    assert "✓  localhost" in done.stdout


@pytest.mark.parametrize("words", [["word"], ["-f", "no-such-file"]])
def test_invalid_arguments_of_env_are_an_error(cpulaunch: Run, words: list[str]) -> None:
    done = cpulaunch("env", *words)
    assert done.returncode == 2
    assert "cpulaunch: error: " in done.stderr
