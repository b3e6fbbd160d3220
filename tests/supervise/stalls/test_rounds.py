"""Inquiries for commands, and ranks that show C frames on behalf of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpulaunch.messages import AskDump, Dump
from cpulaunch.supervise.job.events import DumpFinished, Send
from cpulaunch.supervise.stalls.inquiry import ANSWER_WITHIN, Inquiry
from cpulaunch.supervise.stalls.rounds import Rounds

POLL = ["poll", "/usr/lib/libc.so.6", 0]


class Asked:
    """Agents that answer inquiries, with request numbers from 1 on."""

    def __init__(self) -> None:
        self.inquiry = Inquiry()
        self.rounds = Rounds(self.inquiry)

    def says(self, rank: int, dump: Dump, now: float = 1.0) -> list[Send | DumpFinished]:
        self.inquiry.store_answer(rank, dump, now)
        return self.rounds.look(now)


def answer(request: int) -> Dump:
    return Dump(request, 1.0, [], [], "")


def test_a_round_is_complete_when_all_have_answered() -> None:
    asked = Asked()
    assert asked.rounds.ask([0, 1], False, 1.0) == [Send(rank, AskDump(1, False)) for rank in (0, 1)]
    assert asked.says(0, answer(1)) == []
    assert asked.rounds.due == 1.0 + ANSWER_WITHIN
    assert asked.says(1, answer(1)) == [DumpFinished(False, {0: answer(1), 1: answer(1)}, [])]
    assert (asked.rounds.look(1.0), asked.rounds.due) == ([], None)


def test_ranks_that_do_not_answer_in_time_are_named() -> None:
    asked = Asked()
    asked.rounds.ask([0, 1, 2], False, 0.0)
    asked.says(0, answer(1))
    asked.inquiry.remove_rank(1)
    assert asked.rounds.look(ANSWER_WITHIN - 1) == []
    assert asked.rounds.look(ANSWER_WITHIN) == [DumpFinished(False, {0: answer(1)}, [1, 2])]


def test_equal_requests_share_a_round() -> None:
    asked = Asked()
    asked.rounds.ask([0], True, 0.0)
    assert asked.rounds.ask([0], True, 1.0) == []
    assert asked.rounds.ask([0], False, 1.0) == [Send(0, AskDump(2, False))]
    assert asked.says(0, answer(2)) == [DumpFinished(False, {0: answer(2)}, [])]


def test_a_job_without_ranks_gets_an_empty_answer() -> None:
    asked = Asked()
    assert asked.rounds.ask([], True, 0.0) == []
    assert asked.rounds.look(0.0) == [DumpFinished(True, {}, [])]


def in_python(request: int, line: int, *inner: list[Any], wchan: str = "futex_wait") -> Dump:
    """A rank at a line of train.py, and the C functions called from there."""
    main = {"id": 1, "name": "MainThread", "frames": [*inner, ["step", "train.py", line]]}
    loader = {"id": 2, "name": "loader", "frames": [*inner, ["load", "data.py", 5]]}
    program = {"pid": 7, "state": "S", "wchan": wchan, "threads": [main, loader]}
    return Dump(request, 1.0, [], [program], "")


def asked_closely(*answers: Dump) -> tuple[Asked, list[int]]:
    """Let all ranks report their Python frames; return the ranks that get a second request."""
    asked, sends = Asked(), list[Send | DumpFinished]()
    asked.rounds.ask(range(len(answers)), True, 0.0)
    for rank, dump in enumerate(answers):
        assert sends == []
        sends = asked.says(rank, dump)
    again = [each.rank for each in sends if isinstance(each, Send)]
    assert sends == [Send(rank, AskDump(2, True)) for rank in again]
    return asked, again


def seen(found: Sequence[Send | DumpFinished]) -> DumpFinished:
    (dumped,) = found
    assert isinstance(dumped, DumpFinished)
    return dumped


def test_only_one_of_several_ranks_with_equal_python_frames_shows_c_frames() -> None:
    at_5, at_9, elsewhere = in_python(1, 5), in_python(1, 9), in_python(1, 5, wchan="ep_poll")
    asked, again = asked_closely(at_5, at_9, at_5, elsewhere, at_5)
    assert again == [0, 1, 3]
    asked.says(0, in_python(2, 5, POLL))
    asked.says(1, in_python(2, 9, POLL))
    found = seen(asked.says(3, in_python(2, 5, POLL)))
    for rank in (2, 4):
        (program,) = found.answers[rank].processes
        assert program["native_of"] == 0
        assert [thread["frames"][0] for thread in program["threads"]] == [POLL, POLL]
    assert "native_of" not in found.answers[0].processes[0]


def test_a_rank_that_has_continued_shows_no_frames_for_others() -> None:
    asked, again = asked_closely(in_python(1, 5), in_python(1, 5))
    assert again == [0]
    found = seen(asked.says(0, in_python(2, 6, POLL)))
    assert found.answers[1].processes == in_python(1, 5).processes
    assert found.answers[1].error == "has no frames of C: they were to come from rank 0, which has gone on"


def test_a_rank_with_an_unknown_stack_shows_its_own() -> None:
    """For example, a program that isn't Python."""
    without = Dump(1, 1.0, [], [{"pid": 7, "state": "S", "wchan": "do_wait", "threads": []}], "")
    assert asked_closely(without, without)[1] == [0, 1]
