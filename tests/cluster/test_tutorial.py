"""Run the commands in docs/tutorial.md in their order, and compare their output with the page.

``UPDATE_GOLDEN=1`` writes the output into the page.  A line ``…`` stands for the rest of an output.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY, clean_environment, needs_two_cores
from support.faults import Cluster

from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    needs_two_cores,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

PAGE = REPOSITORY / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```\n(\$ .*?)^```", re.M | re.S)
TIMEOUT = 180.0
HOME = "/home/me"

VARYING = (
    (r"\x1b\[[0-9;]*m", ""),
    (r" \([^()]*GFLOP/s\)| \(not measured[^()]*\)", ""),
    (r"(engine \w+): .*", r"\1"),
    (r"\b(bf16|fp32)\b", "PRECISION"),
    (r"\d{8}-\d{6}-[0-9a-f]{16}", "JOB"),
    (r"[╭╮╰╯│─]+", ""),
    (r"\d+ threads?\b", "THREADS"),
    (r"\d[\d.,]*", "N"),
    (r" +", " "),
)
"""Patterns of text that differs between runs or machines, and their replacements when outputs are
compared."""

MACHINES_OWN = re.compile(r"^  MFU .*|^what stands out$", re.M)
"""Start of the part of a report that depends on this machine's counters and load."""


def shape(output: str) -> list[str]:
    """The distinct lines of an output without varying text.  After a restart, ranks may repeat steps."""
    text = MACHINES_OWN.split(output)[0]
    for pattern, substitute in VARYING:
        text = re.sub(pattern, substitute, text)
    return sorted({line.strip() for line in text.splitlines()} - {""})


def aligned(output: str) -> str:
    """Shrink boxes to fit their text, which gets shorter when paths are replaced."""

    def box(match: re.Match[str]) -> str:
        head, *body, _ = match[0].splitlines()
        title, texts = head.strip("╭╮─ "), [re.sub(r"^│ ?| *│$", "", line) for line in body]
        width = max(len(title), *map(len, texts))
        rows = "".join(f"│ {text:{width}} │\n" for text in texts)
        return f"╭─ {title} {'─' * (width - len(title) - 1)}╮\n{rows}╰{'─' * (width + 2)}╯"

    return re.sub(r"^╭.*\n(?:│.*\n)+╰.*", box, output, flags=re.M)


def commands(block: str) -> list[tuple[str, str]]:
    """The commands in a block, each with the output shown below it."""
    parts = re.split(r"^\$ ", block, flags=re.M)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def test_the_tutorial_has_ten_steps_and_each_has_a_command() -> None:
    steps = re.split(r"^## (\d+)\. .*\n", PAGE.read_text(), flags=re.M)[1:]
    assert steps[::2] == [str(number) for number in range(1, 11)]
    assert all(BLOCK.search(text) for text in steps[1::2])


def test_the_commands_of_the_tutorial_print_the_shown_output(cluster: Cluster, tmp_path: Path) -> None:
    page = PAGE.read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "train.py").write_text(script)
    tools = tmp_path / ".bin"
    tools.mkdir()
    for name, argv in (("python", [sys.executable]), ("cpulaunch", [sys.executable, "-m", "cpulaunch"])):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
        (tools / name).chmod(0o755)
    env = clean_environment(LC_ALL="C.UTF-8", COLUMNS="110")
    env["PATH"] = f"{tools}:{env['PATH']}"

    def run(command: str) -> str:
        argv = ["bash", "-c", f"{command} 2>&1"]
        return cluster.run("node0", argv, timeout=TIMEOUT, directory=tmp_path, env=env).stdout.expandtabs()

    def check(match: re.Match[str]) -> str:
        shown = ""
        for command, expected in commands(match[1]):
            printed = aligned(run(command).replace(str(tmp_path), HOME).replace(sys.prefix, "/venv"))
            if expected.endswith("…\n"):
                lines = expected.count("\n") - 1
                printed = "".join(printed.splitlines(keepends=True)[:lines])
                expected = expected.removesuffix("…\n")
                shown += f"$ {command}\n{printed}…\n"
            else:
                shown += f"$ {command}\n{printed}"
            if not os.environ.get("UPDATE_GOLDEN"):
                assert shape(printed) == shape(expected), command
        return f"```\n{shown}```"

    recorded = BLOCK.sub(check, page)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(recorded)
