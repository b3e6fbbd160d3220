from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command import clean_environment
from support.faults import Cluster
from support.terminal import Terminal

OF_THE_TERMINAL = ("LC_", "LANG", "NO_COLOR", "COLUMNS", "LINES", "TERM")


@pytest.fixture
def wizard(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Start ``cpulaunch config ARGUMENTS`` in an empty directory, here or on the login host of a cluster."""
    started: list[Terminal] = []

    def start(*arguments: str, columns: int = 80, on: Cluster | None = None, **env: str) -> Terminal:
        command = [sys.executable, "-m", "cpulaunch", "config", *arguments]
        command = on.command("login", command, tmp_path) if on else command
        clean = {k: v for k, v in clean_environment().items() if not k.startswith(OF_THE_TERMINAL)}
        started.append(Terminal(tmp_path, {**clean, **env}, command, columns))
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


@pytest.fixture
def four_nodes(tmp_path: Path) -> Path:
    """A hostfile of four hosts with a rank each, where the wizard looks for one."""
    path = tmp_path / "hostfiles" / "four-nodes"
    path.parent.mkdir()
    path.write_text("node1\nnode2\nnode3\nnode4\n")
    return path
