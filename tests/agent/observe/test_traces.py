"""How an agent gets a trace from its program, through the ledger and a file, and sends it in pieces."""

from __future__ import annotations

import base64
import gzip
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpulaunch import ledger
from cpulaunch.agent.observe import traces
from cpulaunch.agent.observe.traces import RankTraces
from cpulaunch.agent.program import ledger_file
from cpulaunch.messages import HasTraced, SendTrace, Trace, Traced, TracePiece, Traces
from cpulaunch.wire import MAX_LINE, encode

TRACE = Trace(7, 12, 14)


class Agent:
    """An agent whose program the test plays."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory, self.said = memory, list[object]()
        self.traces = RankTraces(SimpleNamespace(ledger=memory), self.said.append)  # type: ignore[arg-type]

    def asked(self) -> Path:
        """Ask for a trace; return the directory in which the program has to write it."""
        self.traces.ask(TRACE)
        request = ledger.trace_request(self.memory)
        assert request[:3] == TRACE
        return Path(request.directory)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fd, memory = ledger_file.offer({})
    assert fd is not None
    assert memory is not None
    os.close(fd)
    yield Agent(memory)
    assert os.listdir(tmp_path) == []


def written(agent: Agent, data: bytes) -> None:
    directory = agent.asked()
    assert directory.stat().st_mode & 0o777 == 0o700
    (directory / ledger.TRACE_FILE).write_bytes(data)
    agent.traces.reported(Traces(7, 12))
    agent.traces.reported(HasTraced(7, 12, 14, ""))
    assert not directory.exists()


def test_a_trace_is_sent_in_pieces_that_fit(agent: Agent) -> None:
    """The data can't be compressed."""
    data = os.urandom(2 * traces.PIECE + 5)
    written(agent, data)
    assert agent.said[1] == Traced(7, 12, 14, len(data), "")
    while agent.traces.sending:
        agent.traces.send(SendTrace(7))
    pieces = [piece for piece in agent.said[2:] if isinstance(piece, TracePiece)]
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(encode(piece)) for piece in pieces) < MAX_LINE
    assert gzip.decompress(b"".join(base64.b64decode(piece.data) for piece in pieces)) == data


def test_a_program_that_ends_during_a_trace_leaves_no_files(agent: Agent) -> None:
    (agent.asked() / ledger.TRACE_FILE).write_text("half a tr")
    agent.traces.program_ended()
    assert agent.said == [Traced(7, 0, 0, 0, "its program exited without a step of an optimizer")]


def test_a_program_may_end_once_its_trace_is_written(agent: Agent) -> None:
    written(agent, b"{}")
    agent.traces.program_ended()
    assert agent.traces.sending
    agent.traces.drop()
    assert not agent.traces.sending


def test_a_trace_can_be_cancelled(agent: Agent) -> None:
    agent.asked()
    agent.traces.ask(Trace(7, 0, 0))
    assert ledger.trace_request(agent.memory).first == 0
    agent.traces.reported(HasTraced(7, 12, 14, ""))  # the program has not seen this request yet
    agent.traces.send(SendTrace(7))
    assert agent.said == []


def test_an_unreadable_trace_is_reported(agent: Agent) -> None:
    agent.asked()
    agent.traces.reported(HasTraced(7, 12, 14, ""))
    agent.asked()
    agent.traces.reported(HasTraced(7, 0, 0, "RuntimeError: the program uses torch's profiler itself"))
    assert [each.error for each in agent.said if isinstance(each, Traced)] == [
        "its file can't be read: No such file or directory",
        "RuntimeError: the program uses torch's profiler itself",
    ]


def test_a_program_without_a_ledger_cannot_be_traced() -> None:
    said: list[object] = []
    RankTraces(None, said.append).ask(TRACE)
    assert said == [Traced(7, 0, 0, 0, traces.NO_LEDGER)]
