"""Other users can't read a job's secrets, and their jobs and files don't disturb ours."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import TIMEOUT
from support.jobs import job
from support.running_jobs import SLEEPS, Ask, directory_of

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


def test_only_the_owner_can_read_a_jobs_files(env: dict[str, str], tmp_path: Path) -> None:
    with job(tmp_path, env, [], SLEEPS) as launcher:
        control = directory_of(tmp_path) / "control.json"
        (entry,) = Path(env["XDG_RUNTIME_DIR"]).rglob("*.json")
        assert stat.S_IMODE(control.stat().st_mode) == 0o600
        assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
        token = json.loads(control.read_text())["token"]
        for file in (entry, directory_of(tmp_path) / "events.jsonl"):
            assert token not in file.read_text()
        (tmp_path / "go").touch()
        launcher.wait(TIMEOUT)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that all users can read, in a path that all users can enter."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


@needs_root
def test_another_user_learns_nothing_of_a_job(
    env: dict[str, str], ask: Ask, open_directory: Path, tmp_path: Path
) -> None:
    """The user can neither read the file with the job's address nor connect to the job's socket."""
    with job(open_directory, env, [], SLEEPS) as launcher:
        directory = directory_of(open_directory)
        contact = json.loads((directory / "control.json").read_text())
        assert (directory / "events.jsonl").stat().st_mode & 0o004
        theirs = (
            "import os, sys; os.setgid(65534); os.setuid(65534)\n"
            "import socket; from pathlib import Path\n"
            "from cpulaunch.supervise.control.registry import read_contact\n"
            f"assert read_contact(Path({str(directory)!r})) is None\n"
            "s = socket.socket(socket.AF_UNIX)\n"
            f"s.connect({chr(0) + contact['address'][1:]!r})\n"
            "assert s.recv(100) == b''\n"
        )
        code = (
            f"import sys; sys.path[:0] = {sys.path!r}\nimport cpulaunch.supervise.control.registry\n{theirs}"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, cwd="/"
        )
        assert done.returncode == 0, done.stderr
        (open_directory / "go").touch()
        launcher.wait(TIMEOUT)


@needs_root
def test_a_control_file_of_another_user_is_not_read(ask: Ask, tmp_path: Path) -> None:
    """Otherwise, the other user could make cpulaunch connect to any address and show any text."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        (tmp_path / "theirs").mkdir()
        (control := tmp_path / "theirs/control.json").write_text(
            json.dumps(
                {
                    "job": "x",
                    "pid": 1,
                    "host": "x",
                    "started": 0,
                    "address": f"127.0.0.1:{server.getsockname()[1]}",
                    "token": "",
                    "command": [],
                }
            )
        )
        os.chown(control, 65534, 65534)
        assert "no job is running there" in ask("stacks", "theirs").stderr
        with pytest.raises(BlockingIOError):
            server.accept()


@needs_root
def test_no_file_is_made_in_another_users_directory(env: dict[str, str], ask: Ask, tmp_path: Path) -> None:
    """``su`` doesn't reset $XDG_RUNTIME_DIR, so the directory may be root's.

    The list of jobs is then kept elsewhere.
    """
    theirs = Path(env["XDG_RUNTIME_DIR"])
    os.chown(theirs, 65534, 65534)
    with job(tmp_path, env, [], SLEEPS) as launcher:
        assert list(theirs.iterdir()) == []
        assert ask("jobs").stdout.startswith(directory_of(tmp_path).name)
        (tmp_path / "go").touch()
        launcher.wait(TIMEOUT)


@needs_root
def test_without_a_name_logs_skips_jobs_of_other_users(ask: Ask, tmp_path: Path) -> None:
    """The other user shares the directory and has run a newer job."""
    for second in (10, 11):
        (place := tmp_path / "runs" / f"20261122-2144{second}-0f3c9a7e5b1d2c48").mkdir(parents=True)
        (place / "plan.json").write_text('{"world_size": 1}')
        (place / "outcome.json").write_text('{"kind": "ok"}')
        (place / "rank-0.log").write_text(f"{second}\n")
    os.chown(place, 65534, 65534)
    assert ask("logs").stdout == "[0] 10\n"
    assert ask("logs", place).stdout == "[0] 11\n"
    shutil.rmtree(tmp_path / "runs" / "20261122-214410-0f3c9a7e5b1d2c48")
    assert "no running job of yours, and no job in runs/" in ask("logs").stderr
