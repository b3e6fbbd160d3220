from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import TIMEOUT, clean_environment
from support.running_jobs import Ask
from support.terminal import Terminal

OF_THE_TERMINAL = ("LC_", "LANG", "NO_COLOR", "COLUMNS", "LINES", "TERM")


@pytest.fixture
def wizard(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """A function that starts ``cpulaunch config ARGUMENTS`` in an empty directory."""
    started: list[Terminal] = []

    def start(*arguments: str, columns: int = 80, **env: str) -> Terminal:
        command = [sys.executable, "-m", "cpulaunch", "config", *arguments]
        clean = {k: v for k, v in clean_environment().items() if not k.startswith(OF_THE_TERMINAL)}
        started.append(Terminal(tmp_path, {**clean, **env}, command, columns))
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


@pytest.fixture
def four_nodes(tmp_path: Path) -> Path:
    """A hostfile with four hosts, in the directory that the wizard searches."""
    path = tmp_path / "hostfiles" / "four-nodes"
    path.parent.mkdir()
    path.write_text("node1\nnode2\nnode3\nnode4\n")
    return path


@pytest.fixture
def env(marked: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """An environment with a separate list of jobs."""
    (runtime := tmp_path / "runtime").mkdir(mode=0o700)
    return {**marked, "XDG_RUNTIME_DIR": str(runtime), "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def ask(env: dict[str, str], tmp_path: Path) -> Ask:
    """A function that runs ``cpulaunch ARGUMENTS`` while a job runs."""

    def run(*arguments: object, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cpulaunch", *map(str, arguments)],
            cwd=cwd,
            env=clean_environment(**env),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=TIMEOUT,
        )

    return run


def popen(directory: Path, env: dict[str, str], *words: str, **streams: Any) -> subprocess.Popen[str]:
    """Start ``cpulaunch WORDS``, with a pipe for its output."""
    return subprocess.Popen(
        [sys.executable, "-m", "cpulaunch", *words],
        cwd=directory,
        env=clean_environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        **streams,
    )


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with ``train.py``, ``inside/other.py``, a hostfile with two hosts, no settings."""
    for name in [name for name in os.environ if name.startswith("CPULAUNCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("a\nb\n")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "other.py").touch()
