"""The program that reports facts about its host, run on this host."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from cpulaunch import __version__
from cpulaunch.discovery.probe.messages import MARK, ProbeRequest, ProbeResponse
from cpulaunch.discovery.probe.probe import probe_hosts
from cpulaunch.launchers.reach import NoReach
from cpulaunch.model.facts import HostFacts


def ask(
    directory: Path, *, python: str = sys.executable, files: list[str], ports: list[int]
) -> ProbeResponse:
    request = ProbeRequest(
        python=python, directory=str(directory), files=files, optional=[], identical=files, packages=[], libraries=[],
        master="localhost", ports=ports, interface=None, limits={},
    )  # fmt: skip
    return probe_hosts(["here"], frozenset({"here"}), request, NoReach(), print)["here"]


def test_a_host_answers_a_request(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    response = ask(tmp_path, files=[str(tmp_path / "a"), str(tmp_path / "b")], ports=[0])
    answer = response.answer
    assert answer
    assert (answer.name, answer.directory) == (socket.gethostname(), True)
    assert re.fullmatch(f"{re.escape(__version__)}, code [0-9a-f]{{12}}", answer.versions["cpulaunch"])
    assert answer.missing == [str(tmp_path / "b")]
    assert [digest and len(digest) for digest in answer.digests.values()] == [64, None]
    assert response.sent <= answer.time <= response.received
    assert answer.facts
    assert HostFacts.from_json(answer.facts).topology.cpus
    assert answer.listening
    assert response.connect_error is None


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        answer, other = (ask(tmp_path, files=[], ports=ports).answer for ports in ([port], [port, 0]))
    assert answer
    assert (answer.listening, answer.listen_error) == (None, "Address already in use")
    assert other
    assert other.listening


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"type":"answer","name":"x"}', "answer without time"),
        ('{"type":"answer","name":7}', "answer whose name is '7'"),
        ('{"type":"confession"}', "an answer of the unknown kind 'confession'"),
        ("garbled", "not JSON"),
    ],
)
def test_a_malformed_answer_is_an_error_at_once(tmp_path: Path, line: str, error: str) -> None:
    (program := tmp_path / "python").write_text(f"#!/bin/sh\necho '{MARK}{line}'\ncat >/dev/null\n")
    program.chmod(0o755)
    response = ask(tmp_path, python=str(program), files=[], ports=[])
    assert (response.answer, response.exit_code, response.error) == (None, 0, error)
