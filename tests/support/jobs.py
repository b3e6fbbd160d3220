"""Start jobs, and read their output and files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from support.command import TIMEOUT, bounded, clean_environment


def outputs(done: subprocess.CompletedProcess[str]) -> list[dict]:
    """The output of `SHOW`, by rank.  Each line had its rank's prefix."""
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ") for line in done.stdout.splitlines()]
    by_rank = {int(prefix[1:]): json.loads(rest) for prefix, _, rest in lines}
    assert len(by_rank) == len(lines)
    return [by_rank[rank] for rank in sorted(by_rank)]


def output_of_one(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON printed by the only rank, with a prefix if no launcher removes it."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.removeprefix("[0] "))


def run_changed(
    code: str, *arguments: str, directory: Path, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run ``code``, which changes cpulaunch and calls its entry point, with the arguments of a command."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=directory,
        env=clean_environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def box(text: str) -> tuple[str, list[str]]:
    """Title and lines of the one box in ``text``."""
    (first,) = [number for number, line in enumerate(text.splitlines()) if line.startswith("╭")]
    lines = text.splitlines()[first:]
    last = next(number for number, line in enumerate(lines) if line.startswith("╰"))
    return lines[0].strip("╭╮─ "), [line[2:-2].rstrip() for line in lines[1:last]]


def outcome(directory: Path) -> dict:
    """The outcome.json of the one job that was run in ``directory``."""
    (path,) = directory.glob("runs/*/outcome.json")
    return json.loads(path.read_text())


class job:
    """A running job of two ranks that have both said "ready"."""

    def __init__(
        self,
        directory: Path,
        env: dict[str, str],
        options: list[str],
        program: str,
        *further: str,
        wrapper: Sequence[str] = (),
        stderr: IO[str] | None = None,
    ) -> None:
        (directory / "program.py").write_text(program)
        command = [
            *wrapper,
            sys.executable,
            "-m",
            "cpulaunch",
            "run",
            "-n",
            "2",
            "--tee",
            "all",
            *options,
            *further,
            "program.py",
        ]
        self.launcher = subprocess.Popen(
            command,
            cwd=directory,
            env=clean_environment(**env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
        )

        self._open = contextlib.ExitStack()

    def __enter__(self) -> subprocess.Popen[str]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                bounded(self.launcher, 3 * TIMEOUT)
            )  # each command that runs beside the job has TIMEOUT
            stack.callback(self._terminate)
            assert self.launcher.stdout
            ready = {self.launcher.stdout.readline().strip(), self.launcher.stdout.readline().strip()}
            assert ready == {"[0] ready", "[1] ready"}
            self._open = stack.pop_all()
        return self.launcher

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _terminate(self) -> None:
        """Interrupt the job, so that its ranks end as well."""
        self.launcher.terminate()
        self.launcher.wait(TIMEOUT)
