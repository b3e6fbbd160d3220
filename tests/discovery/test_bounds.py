"""Probing and sweeping very many hosts: the limits on simultaneous connections and open files."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pytest
from support.answers import answer
from support.command import TIMEOUT, clean_environment

from cpulaunch.discovery.probe import probe
from cpulaunch.discovery.probe.messages import KINDS, MARK, ProbeRequest
from cpulaunch.supervise.attempts import sweep
from cpulaunch.wire import encode

HOSTS = [f"node{number:04d}" for number in range(200)]


class Counting:
    """Reaches every host by a command that logs its start and its end in a file."""

    program = "ssh"

    def __init__(self, directory: Path, script: str) -> None:
        self.log = directory / "log"
        self.script = f"echo 1 >>{self.log}; {script}; echo -1 >>{self.log}"

    def command(self, host: str, line: str) -> tuple[str, ...]:
        return ("sh", "-c", self.script)

    def counts(self) -> tuple[int, int]:
        """The number of hosts that were reached, and the most at the same time."""
        steps = list(map(int, self.log.read_text().split()))
        return steps.count(1), max(accumulate(steps))


@contextmanager
def without_files() -> Iterator[None]:
    """Prevent this process from opening any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_number_of_hosts_swept_at_once_is_limited(tmp_path: Path) -> None:
    reach = Counting(tmp_path, "sleep 0.05")
    assert asyncio.run(sweep.sweep_hosts(HOSTS, "job", reach)) == []
    total, most = reach.counts()
    assert total == len(HOSTS)
    assert most <= sweep.AT_ONCE


def test_the_number_of_hosts_probed_at_once_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh processes that wait count, too, as they use memory and descriptors."""
    monkeypatch.setattr(probe, "MAX_BUSY", 4)
    (tmp_path / "answer").write_bytes(MARK.encode() + encode(answer(1), KINDS))
    reach = Counting(tmp_path, f"read request; cat {tmp_path}/answer; cat >/dev/null")
    request = ProbeRequest("python", "/", [], [], [], [], [], HOSTS[0], 0, None, {})
    responses = probe.probe_hosts(HOSTS[:40], frozenset(), request, reach, print)
    assert all(response.answer for response in responses.values())
    total, most = reach.counts()
    assert total == 40
    assert most <= 4 + 1  # the master's connection stays


class Holding:
    """Reaches hosts 1 to 4 only after the last host has been reached."""

    def __init__(self, directory: Path) -> None:
        self.last = directory / "last"

    def command(self, host: str, line: str) -> tuple[str, ...]:
        if host in HOSTS[1:5]:
            return ("sh", "-c", f"until test -e {self.last}; do sleep 0.01; done; exit 255")
        return ("sh", "-c", f"touch {self.last}; exit 255" if host == HOSTS[39] else "exit 255")


def test_slow_hosts_do_not_delay_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that are down answer late.  If they counted as busy, a thousand of them would take minutes."""
    monkeypatch.setattr(probe, "MAX_BUSY", 4)
    monkeypatch.setattr(probe, "SLOW_AFTER", 0.1)
    request = ProbeRequest("python", "/", [], [], [], [], [], HOSTS[0], 0, None, {})
    responses = probe.probe_hosts(HOSTS[:40], frozenset(), request, Holding(tmp_path), print)
    assert {response.exit_code for response in responses.values()} == {
        255
    }  # the exit code would be None after a timeout


def test_the_number_of_connections_to_slow_hosts_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MAX_BUSY", 2), ("MAX_CONNECTIONS", 6), ("SLOW_AFTER", 0.0)):
        monkeypatch.setattr(probe, name, value)
    reach = Counting(tmp_path, "sleep 0.05")
    request = ProbeRequest("python", "/", [], [], [], [], [], HOSTS[0], 0, None, {})
    probe.probe_hosts(HOSTS[:40], frozenset(), request, reach, print)
    total, most = reach.counts()
    assert total == 40
    assert 2 < most <= 6


def test_probing_hosts_restores_the_limit_of_open_files(tmp_path: Path) -> None:
    """The limit is raised while hosts are probed, but the job's programs must inherit the original limit."""
    request = ProbeRequest("python", "/", [], [], [], [], [], HOSTS[0], 0, None, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        reach = Counting(tmp_path, f"ulimit -Sn >{tmp_path}/meanwhile; exit 255")
        probe.probe_hosts(HOSTS[:1], frozenset(), request, reach, print)
        assert int((tmp_path / "meanwhile").read_text()) > 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (100, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_sweep_that_cannot_start_is_reported_in_one_line(tmp_path: Path) -> None:
    async def sweep_without_files() -> str:
        with without_files():
            sweep.sweep("job")
            return sweep.local_failures(await sweep.sweep_hosts(HOSTS, "job", Counting(tmp_path, "true")))

    line = asyncio.run(sweep_without_files())
    names = "node[0000-0199]"
    assert line == f"processes may be left on {names}, because ssh can't be started here: Too many open files"


def test_a_host_that_cannot_be_probed_without_a_free_descriptor_is_reported(tmp_path: Path) -> None:
    limit = (24, 24)
    (tmp_path / "bin").mkdir()
    (ssh := tmp_path / "bin/ssh").write_text("#!/bin/sh\nread request\nexit 255\n")
    ssh.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "hosts", "check", "--hosts", "node[1-40]"],
        cwd=tmp_path,
        env=clean_environment(PATH=f"{tmp_path}/bin:{os.environ['PATH']}"),
        timeout=TIMEOUT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
    )
    assert done.returncode == 3
    assert "ssh.sh can't be started here: Too many open files" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
