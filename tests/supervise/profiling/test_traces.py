"""The launcher's part in a trace, with simulated agents."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from trace.recorded import Recorded
from typing import Any

import pytest
from support.command import TIMEOUT

from cpulaunch import messages
from cpulaunch.messages import (
    AskProgress,
    AskTime,
    Beat,
    LauncherMessage,
    SendTrace,
    Trace,
    Traced,
    TracePiece,
)
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.profiling import traces
from cpulaunch.supervise.profiling.traces import Profile, Profiling

AHEAD = 40.0
"""Seconds by which the clock of rank 1's host is ahead of the launcher's."""


class Job:
    """A job of two ranks on two hosts.  Agents answer normally, or as ``answers`` says."""

    def __init__(self, directory: Path) -> None:
        self.ranks = [Rank(0, "a", RankState.RUNNING), Rank(1, "b", RankState.RUNNING, clock=-AHEAD)]
        self.sent: list[tuple[int, LauncherMessage]] = []
        self.told: list[str] = []
        self.answers: dict[tuple[int, type[Any]], Callable[[Any], object]] = {}
        self.profiling = Profiling(self.ranks, self.send, JobDirectory(directory))

    def send(self, rank: int, message: LauncherMessage) -> None:
        self.sent.append((rank, message))
        answer = self.answers.get((rank, type(message)), getattr(self, type(message).__name__))
        asyncio.get_running_loop().call_soon(self.hear, rank, answer, message)

    def hear(self, rank: int, answer: Callable[..., object], message: Any) -> None:
        if answer in (self.Trace, self.SendTrace, self.AskProgress, self.AskTime):
            said = answer(message, rank)
        else:
            said = answer(message)
        if isinstance(said, Beat):
            self.ranks[rank].record_beat(said, asyncio.get_running_loop().time())
        if said is not None:
            self.profiling.handle_message(rank, said)

    def AskProgress(self, message: AskProgress, rank: int) -> Beat:
        return Beat(9, expects_steps=True, keeps_ledger=True)

    def AskTime(self, message: AskTime, rank: int) -> messages.Time:
        return messages.Time(asyncio.get_running_loop().time() + (AHEAD if rank else 0.0))

    def Trace(self, message: Trace, rank: int) -> Traced | None:
        return Traced(message.request, message.first, message.last, 7, "") if message.first else None

    def SendTrace(self, message: SendTrace, rank: int) -> TracePiece:
        text = Recorded(rank, ahead=AHEAD * rank).collective("all_reduce", 100, 800, 3).text()
        packed = base64.b64encode(gzip.compress(text.encode())).decode()
        return TracePiece(message.request, packed, True, "")

    async def say(self, line: str) -> None:
        self.told.append(line)

    async def trace(self, *ranks: int) -> Profile:
        return await self.profiling.trace(2, ranks, self.say)


def played(directory: Path, play: Callable[[Job], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        return await asyncio.wait_for(play(Job(directory)), TIMEOUT)

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LOOK", 0.0)


def test_all_ranks_trace_the_same_steps_and_their_clocks_are_compared(tmp_path: Path) -> None:
    async def play(job: Job) -> Any:
        return await job.trace(), job

    done, job = played(tmp_path, play)
    assert (done.file, done.error) == ("trace.json.gz", "")
    assert [(rank, sent) for rank, sent in job.sent if isinstance(sent, Trace)] == [
        (0, Trace(1, 11, 12)),
        (1, Trace(1, 11, 12)),
    ]
    assert job.told == ["tracing steps 11 to 12 of 2 ranks …"]
    assert sorted(os.listdir(tmp_path)) == ["trace.json.gz", "trace.summary.json", "trace.txt"]
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event["ph"] == "s" for event in events) == 1
    times = {event["pid"]: event["ts"] for event in events if event["name"] == "ccl:all_reduce"}
    assert abs(times[1] - times[2]) < 1e4  # they don't differ by AHEAD, 4e7


def test_a_rank_that_ends_is_missing_from_the_trace(tmp_path: Path) -> None:
    async def play(job: Job) -> Any:
        job.answers[1, SendTrace] = lambda message: job.profiling.handle_disconnection(1)
        return await job.trace()

    done = played(tmp_path, play)
    assert "rank 1 is missing: its agent disconnected before it had sent everything" in done.text
    assert sorted(os.listdir(tmp_path)) == ["trace.json.gz", "trace.summary.json", "trace.txt"]


def test_a_trace_that_no_rank_can_make_is_refused(tmp_path: Path) -> None:
    async def play(job: Job) -> Any:
        for rank in (0, 1):
            job.answers[rank, Trace] = lambda message: Traced(message.request, 0, 0, 0, "no room in /tmp")
        first = await job.trace()
        job.answers = {(0, SendTrace): lambda message: TracePiece(message.request, "?!", True, "")}
        return first, await job.trace(0), await job.trace(5)

    done = played(tmp_path, play)
    assert [each.error for each in done] == [
        "ranks 0-1: no room in /tmp",
        "rank 0: a piece of the trace is not valid base64",
        "there is no rank 5: the ranks are 0 to 1",
    ]
    assert os.listdir(tmp_path) == []


async def under_way(job: Job) -> asyncio.Task[Any]:
    """A requested trace that the ranks don't answer."""
    asked = asyncio.Event()
    for rank in (0, 1):
        job.answers[rank, Trace] = lambda message: asked.set()
    task = asyncio.create_task(job.trace())
    await asked.wait()
    return task


def test_only_one_trace_at_a_time_is_possible(tmp_path: Path) -> None:
    async def play(job: Job) -> Any:
        task = await under_way(job)
        second = await job.trace()
        job.profiling.handle_message(1, messages.Tracing(1, 14))
        for rank in (0, 1):
            job.profiling.handle_message(rank, Traced(1, 11, 12, 7, ""))
        return second, await task, job.told

    second, first, told = played(tmp_path, play)
    assert second.error == "another trace of this job is running"
    assert (first.error, told[1]) == ("", "rank 1 was already past step 11, and traces from step 14 on")


def test_a_trace_ends_when_its_requester_disconnects(tmp_path: Path) -> None:
    async def play(job: Job) -> Any:
        task = await under_way(job)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        cancelled = [each for each in job.sent if isinstance(each[1], Trace)][-2:]
        job.answers = {}
        return cancelled, await job.trace()

    cancelled, again = played(tmp_path, play)
    assert cancelled == [(0, Trace(1, 0, 0)), (1, Trace(1, 0, 0))]
    assert again.error == ""


def test_steps_from_the_start_are_requested_when_a_rank_has_started(tmp_path: Path) -> None:
    async def play(job: Job) -> Any:
        done: asyncio.Queue[Profile] = asyncio.Queue()
        job.profiling.from_start(10, 14, done.put_nowait)
        refused = await job.trace()
        assert refused.error == "another trace of this job is running: steps 10 to 14, by --profile"
        for rank in (0, 1):
            job.profiling.handle_message(rank, messages.Started(1, "0", "", 1, []))
        return await done.get(), job.sent

    done, sent = played(tmp_path, play)
    assert done.error == ""
    assert (0, Trace(1, 10, 14)) in sent


def test_a_job_that_ends_ends_the_trace(tmp_path: Path) -> None:
    async def play(job: Job) -> Any:
        done: asyncio.Queue[Profile] = asyncio.Queue()
        job.profiling.from_start(10, 14, done.put_nowait)
        await job.profiling.finish(failed=True)
        return await done.get()

    assert played(tmp_path, play).error == "ranks 0-1: its agent is disconnected"
