"""A hanging disk, simulated by a log that is a FIFO without a reader, and a disk that fails late."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command import TIMEOUT, clean_environment
from support.jobs import box, job

from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.output.logs import MAX_WAITING, Logs

# Both ranks print "ready" only to the terminal, as rank 0's log is the FIFO from its first line on.
PROGRAM = """
import os, pathlib, signal, time
while not pathlib.Path("hung").exists(): time.sleep(0.01)
print("ready", flush=True)
while not pathlib.Path("go").exists(): time.sleep(0.01)
if os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""


@contextmanager
def hung_job(directory: Path, marked: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A job whose ranks have printed "ready", which the launcher can't write into a log."""
    (directory / "hang.sh").write_text(
        "while ! ls runs/*/events.jsonl; do sleep 0.01; done\nmkfifo $(echo runs/*/)rank-0.log; touch hung\n"
    )
    with subprocess.Popen(
        ["sh", "hang.sh"], cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as hanging:
        try:
            with (
                open(directory / "stderr", "w") as stderr,
                job(directory, marked, [], PROGRAM, "--grace-period", "0.5", stderr=stderr) as launcher,
            ):
                yield launcher
        finally:
            hanging.kill()


def test_ctrl_c_ends_the_job(tmp_path: Path, marked: dict[str, str]) -> None:
    with hung_job(tmp_path, marked) as launcher:
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(TIMEOUT) == 130
    said = (tmp_path / "stderr").read_text()
    assert "interrupted after" in said
    assert "hangs: the job's files are incomplete" in said


@pytest.mark.slow
def test_a_rank_that_fails_is_named(tmp_path: Path, marked: dict[str, str]) -> None:
    with hung_job(tmp_path, marked) as launcher:
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 137
    title, lines = box((tmp_path / "stderr").read_text())
    assert title == "rank 1 on localhost failed first"
    assert lines[0] == "SIGKILL (killed)"


@contextmanager
def disk(directory: Path) -> Iterator[Path]:
    """A separate file system at ``directory``, which may be frozen at the end."""
    if os.geteuid() != 0 or not shutil.which("fsfreeze") or not shutil.which("mkfs.ext4"):
        pytest.skip("only root can mount and freeze a file system, and needs fsfreeze and mkfs.ext4")
    image = directory.with_name("image")
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], timeout=TIMEOUT, check=True)
    directory.mkdir()
    mount = ["mount", "-o", "loop", str(image), str(directory)]
    if subprocess.run(mount, timeout=TIMEOUT, capture_output=True).returncode:
        pytest.skip("no loop device can be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["fsfreeze", "-u", directory], timeout=TIMEOUT, capture_output=True)
        subprocess.run(["umount", directory], timeout=TIMEOUT, check=True)


def wait_for(text: str, file: Path) -> None:
    began = time.monotonic()
    while text not in file.read_text():
        assert time.monotonic() < began + TIMEOUT, file.read_text()
        time.sleep(0.01)


def test_a_frozen_file_system_delays_only_the_launchers_process(
    tmp_path: Path, marked: dict[str, str]
) -> None:
    said = tmp_path / "stderr"
    with disk(tmp_path / "runs") as runs, said.open("w") as stderr:
        sleep = "import time; print('ready', flush=True); time.sleep(300)"
        with job(tmp_path, marked, [], sleep, stderr=stderr) as launcher:
            subprocess.run(["fsfreeze", "-f", runs], timeout=TIMEOUT, check=True)
            launcher.send_signal(signal.SIGINT)
            wait_for("interrupted after", said)
            assert "hangs: the job's files are incomplete" in said.read_text()
            subprocess.run(["fsfreeze", "-u", runs], timeout=TIMEOUT, check=True)
            assert launcher.wait(TIMEOUT) == 130


def test_the_launcher_reports_that_it_waits_for_a_frozen_file_system(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    with disk(tmp_path / "runs") as runs, said.open("w") as stderr:
        subprocess.run(["fsfreeze", "-f", runs], timeout=TIMEOUT, check=True)
        command = [sys.executable, "-m", "cpulaunch", "run", "-n", "1", "--no-python", "true"]
        with subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stderr=stderr) as launcher:
            try:
                wait_for("waiting for the file system of runs; --log-dir names another directory\n", said)
            finally:
                subprocess.run(["fsfreeze", "-u", runs], timeout=TIMEOUT, check=True)
            assert launcher.wait(TIMEOUT) == 0


def test_pending_output_is_limited_and_no_one_waits_for_a_hanging_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "log")
    warnings: list[str] = []
    logs = Logs(JobDirectory(tmp_path), warnings.append)
    logs.append("log", b"x" * MAX_WAITING)
    while logs._bytes:
        time.sleep(0.001)  # until the thread has taken the line
    logs.append("log", b"x" * (MAX_WAITING + 1))
    assert logs.full
    monkeypatch.setattr("cpulaunch.supervise.output.logs.HUNG", 0.0)
    assert not logs.full
    for name in ("log", "launcher.log", "events.jsonl") * 3:
        assert not logs.append(name, b"x" * MAX_WAITING)
    logs.write_whole("outcome", b"ended")
    assert logs._bytes == MAX_WAITING + 1 + len(b"ended")
    assert warnings == [
        f"{tmp_path} does not respond; the job goes on without logs until it does",
        f"{tmp_path} was too slow; its logs are not complete",
    ]
    assert not logs.close(0.1)
    with open(tmp_path / "log", "rb") as reader:  # the disk answers again
        assert len(reader.read(2 * MAX_WAITING + 1)) == 2 * MAX_WAITING + 1
    assert logs.close(TIMEOUT)
    assert (tmp_path / "outcome").read_text() == "ended"


def test_a_slow_disk_loses_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    logs = Logs(JobDirectory(tmp_path), lambda line: None)
    for number in range(1000):
        logs.append("log", b"%d\n" % number)
    logs.finish("log")
    with open(tmp_path / "log") as reader:
        assert reader.read() == "".join(f"{number}\n" for number in range(1000))
    assert logs.close(TIMEOUT)


def test_a_disk_that_fails_when_a_log_is_closed_causes_a_warning(tmp_path: Path) -> None:
    """Here, the log's descriptor is already closed."""
    warnings: list[str] = []
    logs = Logs(JobDirectory(tmp_path), warnings.append)
    logs.append("log", b"x")
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_bytes():
        time.sleep(0.001)
    os.close(logs._open["log"].fileno())
    logs.finish("log")
    logs.append("next", b"y")
    assert logs.close(TIMEOUT)
    assert (tmp_path / "next").read_bytes() == b"y"
    assert warnings == [f"{tmp_path} can't be written: Bad file descriptor; the job goes on without logs"]
