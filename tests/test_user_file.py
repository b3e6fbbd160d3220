"""Pipes as files of the user: they are read if a process writes to them, with a bounded wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run, clean_environment

from cpulaunch import user_file


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "validate", "pipe"),
        ("run", "--config-file", "pipe", "--no-python", "true"),
        ("run", "-f", "pipe", "--no-python", "true"),
    ],
)
def test_a_pipe_without_a_writer_is_an_error(
    cpulaunch: Run, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = cpulaunch(*arguments)
    assert done.returncode == 2
    assert "pipe: " in done.stderr
    assert "it is a pipe that no process writes to" in done.stderr


def test_output_of_a_shell_is_read(tmp_path: Path) -> None:
    """This works even if the writer is slow, or the text is larger than a pipe's buffer."""
    settings = "<(sleep 1.2; yes '# a comment' | head -20000; echo 'hosts: {nproc: 2}')"
    command = (
        f"{sys.executable} -m cpulaunch run --dry-run --config-file {settings} -f <(echo a) --no-python true"
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True,
        timeout=TIMEOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout.startswith("2 ranks on 1 host"), done.stderr


def test_a_writer_that_never_writes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_file, "WRITER_WITHIN", 0.01)
    monkeypatch.setattr(user_file, "SILENT_FOR", 0.02)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(OSError, match="it is a pipe, and nothing came for 0.02 s"):
        user_file.read_user_file(tmp_path / "pipe", 10)
    os.close(writer)
