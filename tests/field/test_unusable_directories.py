"""With unusable directories, no command ends in a traceback, and a job that doesn't need them runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, clean_environment
from support.marks import repeat

from cpulaunch.user_file import cache_home

pytestmark = pytest.mark.slow

STATES = {
    "read-only": 'mount -t tmpfs -o ro none "$DIRECTORY"; enter; exec "$@"',
    "full": 'mount -t tmpfs -o size=4k none "$DIRECTORY"; head -c 4096 /dev/zero >"$DIRECTORY/filler"; enter; exec "$@"',
    "missing": 'enter; rmdir "$DIRECTORY"; exec "$@"',
    # Root ignores the directory's mode unless it drops its capabilities.
    "closed": 'enter; chmod 0 "$DIRECTORY"; exec setpriv --bounding-set=-all --inh-caps=-all "$@"',
}
"""Shell commands that put a directory into each state, in their own mount namespace, and run a command."""

PLACES = {
    "home": 'export HOME="$DIRECTORY"; unset XDG_RUNTIME_DIR XDG_CACHE_HOME XDG_CONFIG_HOME XDG_STATE_HOME; enter() { :; }',
    "temporary files": 'export TMPDIR="$DIRECTORY"; enter() { :; }',
    "log directory": 'enter() { cd "$DIRECTORY"; }',
    "shared memory": 'mount --bind "$DIRECTORY" /dev/shm; DIRECTORY=/dev/shm; enter() { :; }',
    "all of them": 'export HOME="$DIRECTORY" TMPDIR="$DIRECTORY"; mount --bind "$DIRECTORY" /dev/shm; enter() { cd "$DIRECTORY"; };'
    "unset XDG_RUNTIME_DIR XDG_CACHE_HOME XDG_CONFIG_HOME XDG_STATE_HOME",
}

JOBS = {
    "run": "run -n 1 {script}",
    "run by gloo": "run -n 2 --oversubscribe --backend gloo --precision fp32 {script}",
}

COMMANDS = {
    "run --dry-run": "run -n 1 --dry-run {script}",
    "submit": "submit --nodes 1 --dry-run {script}",
    "config": "config --defaults",
    "config show": "config show",
    "config validate": "config validate {settings}",
    "config import": "config import {accelerates}",
    "topology": "topology",
    "hosts": "hosts check --hosts localhost",
    "jobs": "jobs",
    "logs": "logs {job}",
    "report": "report {job}",
    "stacks": "stacks",
    "profile": "profile --steps 1",
    "env": "env",
    "ccl info": "ccl info",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files that the commands use: a script, configuration files, and the directory of an ended job."""
    root = tmp_path_factory.mktemp("files")
    (root / "script.py").write_text("print('ran')\n")
    (root / "settings.yaml").write_text("cpulaunch: 1\n")
    (root / "accelerate.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "run", "-n", "1", "--backend", "gloo", "script.py"],
        cwd=root, env=clean_environment(), capture_output=True, text=True, timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (job,) = (root / "runs").iterdir()
    names = {"script": "script.py", "settings": "settings.yaml", "accelerates": "accelerate.yaml"}
    return {name: str(root / file) for name, file in names.items()} | {"job": str(job)}


def run_with(place: str, state: str, directory: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    (temporary := directory.parent / "temporary").mkdir(
        exist_ok=True
    )  # for logs that can't be written elsewhere
    line = f"set -e; {PLACES[place]}; {STATES[state]}"
    argv = ["unshare", "--mount", "sh", "-c", line, "sh", sys.executable, "-m", "cpulaunch", *words]
    try:
        done = subprocess.run(
            argv, cwd=directory.parent,
            env=clean_environment(DIRECTORY=str(directory), TMPDIR=str(temporary)), text=True,
            capture_output=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        for logs in re.findall(r"logs are in (/\S*/cpulaunch-[^/\s]+)", done.stderr):
            shutil.rmtree(logs, ignore_errors=True)  # if TMPDIR can't be used, they are elsewhere
        return done
    finally:
        if directory.exists():
            directory.chmod(0o700)
            shutil.rmtree(directory)


@pytest.fixture(scope="module", autouse=True)
def mounts() -> None:
    done = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    if done.returncode:
        (pytest.fail if os.environ.get("CPULAUNCH_TEST_CLUSTER") else pytest.skip)("nothing can be mounted")


def can_run(place: str, state: str) -> bool:
    """Whether a job can run.  It can't in a missing directory, or without any directory for its files."""
    return place != "all of them" and (place != "log directory" or state in ("read-only", "full"))


ONCE = (("shared memory", "full"), ("all of them", "read-only"))
CASES = [
    (place, state) if (place, state) in ONCE else repeat(place, state)
    for place in PLACES
    for state in STATES
    if state != "missing" or place not in ("shared memory", "all of them")  # a mount point can't be removed
]


@pytest.mark.parametrize(("place", "state"), CASES)
def test_no_command_ends_in_a_traceback(
    place: str, state: str, files: dict[str, str], tmp_path: Path
) -> None:
    failed = {}
    for name, line in {**JOBS, **COMMANDS}.items():
        done = run_with(place, state, tmp_path / "directory", line.format(**files).split())
        has_to_run = name in JOBS and can_run(place, state)
        wrong = done.returncode not in ((0,) if has_to_run else (0, 2, 3))
        if wrong or "Traceback" in done.stderr or (has_to_run and "ran" not in done.stdout):
            failed[name] = f"{done.returncode}: {done.stderr}"
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('cd "$DIRECTORY"; rmdir "$DIRECTORY"; exec "$@"', "the working directory has been deleted"),
        ('exec "$@" >/dev/full', "No space left on device"),
    ],
)
def test_the_error_names_what_a_command_cannot_do_without(script: str, words: str, tmp_path: Path) -> None:
    (directory := tmp_path / "directory").mkdir()
    argv = ["sh", "-c", script, "sh", sys.executable, "-m", "cpulaunch", "topology"]
    done = subprocess.run(
        argv, env=clean_environment(DIRECTORY=str(directory)), text=True, capture_output=True,
        timeout=TIMEOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n") <= 2) == (3, True), done.stderr
    assert words in done.stderr


def test_without_a_home_the_cache_is_in_the_root_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens in a container whose user isn't in /etc/passwd."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache_home() == Path("/.cache")


def test_a_run_without_a_cache_explains_why_it_uses_gloo(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')\n")
    words = ["run", "-n", "1", "--precision", "fp32", "script.py"]
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", *words], cwd=tmp_path, text=True, capture_output=True,
        env=clean_environment(XDG_CACHE_HOME="/proc/nothing"), timeout=TIMEOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert "compiled files can't be kept in /proc/nothing/cpulaunch/ccl" in done.stderr
