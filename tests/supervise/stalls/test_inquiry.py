"""Asking all agents what their programs do: who is asked, and when the answers are complete."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpulaunch.messages import AskDump, Dump
from cpulaunch.supervise.job.events import Send
from cpulaunch.supervise.stalls.inquiry import ANSWER_WITHIN, INNERMOST, Answers, Dumps, Round


def answer(request: int) -> Dump:
    return Dump(request, 1.0, [], [], "")


def test_a_round_is_over_when_all_have_answered() -> None:
    dumps = Dumps()
    opened, sends = dumps.ask([0, 1], False, 5.0)
    assert sends == [Send(rank, AskDump(1, False)) for rank in (0, 1)]
    dumps.said(0, answer(1))
    dumps.said(1, answer(99))
    assert (dumps.take(5.0), dumps.due) == ([], 5.0 + ANSWER_WITHIN)
    dumps.said(1, answer(1))
    assert dumps.take(6.0) == [opened]
    assert (dumps.take(6.0), dumps.due, opened.silent) == ([], None, [])


def test_a_round_does_not_wait_for_ranks_that_say_nothing_or_have_gone() -> None:
    dumps = Dumps()
    opened, _ = dumps.ask([0, 1, 2], False, 0.0)
    dumps.said(0, answer(1))
    dumps.gone(1)
    assert dumps.take(ANSWER_WITHIN - 1) == []
    assert dumps.take(ANSWER_WITHIN) == [opened]
    assert opened.silent == [1, 2]


def test_those_who_ask_the_same_share_a_round() -> None:
    dumps = Dumps()
    first, _ = dumps.ask([0], True, 0.0)
    second, sends = dumps.ask([0], True, 1.0)
    other, more = dumps.ask([0], False, 1.0)
    assert second is first
    assert (sends, len(more)) == ([], 1)
    dumps.said(0, answer(other.request))
    assert (dumps.look_closer(1.0), dumps.take(1.0)) == ([], [other])


def test_nobody_to_ask_is_an_answer() -> None:
    dumps = Dumps()
    opened, sends = dumps.ask([], True, 0.0)
    assert (sends, dumps.look_closer(0.0), dumps.take(0.0)) == ([], [], [opened])


POLL = ["poll", "/usr/lib/libc.so.6", 0]


def in_python(request: int, line: int, *inner: list[Any], wchan: str = "futex_wait") -> Dump:
    """A rank that is at a line of train.py, and what that has called of C."""
    main = {"id": 1, "name": "MainThread", "frames": [*inner, ["step", "train.py", line]]}
    loader = {"id": 2, "name": "loader", "frames": [*inner, ["load", "data.py", 5]]}
    program = {"pid": 7, "state": "S", "wchan": wchan, "threads": [main, loader]}
    return Dump(request, 1.0, [], [program], "")


def asked_closely(*answers: Dump) -> tuple[Dumps, Round, list[Send]]:
    """All ranks have said where they are in Python; who is asked for more."""
    dumps = Dumps()
    opened, sends = dumps.ask(range(len(answers)), True, 0.0)
    assert sends == [Send(rank, AskDump(1, False)) for rank in range(len(answers))]
    for rank, dump in enumerate(answers):
        assert dumps.look_closer(0.0) == []
        dumps.said(rank, dump)
    return dumps, opened, dumps.look_closer(1.0)


def test_of_ranks_that_do_the_same_in_python_one_shows_the_frames_of_c() -> None:
    at_5, at_9, elsewhere = in_python(1, 5), in_python(1, 9), in_python(1, 5, wchan="ep_poll")
    dumps, opened, sends = asked_closely(at_5, at_9, at_5, elsewhere, at_5)
    assert sends == [Send(rank, AskDump(2, True)) for rank in (0, 1, 3)]
    assert dumps.take(1.0) == []
    for rank, line in ((0, 5), (1, 9), (3, 5)):
        dumps.said(rank, in_python(2, line, POLL))
    assert dumps.take(1.0) == [opened]
    for rank in (2, 4):
        (program,) = opened.answers[rank].processes
        assert program["native_of"] == 0
        assert [thread["frames"][0] for thread in program["threads"]] == [POLL, POLL]
    assert "native_of" not in opened.answers[0].processes[0]


def test_a_rank_that_has_gone_on_shows_no_frames_for_others() -> None:
    dumps, opened, sends = asked_closely(in_python(1, 5), in_python(1, 5))
    assert [each.rank for each in sends] == [0]
    dumps.said(0, in_python(2, 6, POLL))
    assert dumps.take(1.0) == [opened]
    assert opened.answers[1].processes == in_python(1, 5).processes
    assert (
        opened.answers[1].error == "has shown no frames of C: rank 0, which did the same, has gone on since"
    )


def test_a_rank_whose_stack_is_not_known_shows_its_own() -> None:
    """Such as a program that isn't Python."""
    without = Dump(1, 1.0, [], [{"pid": 7, "state": "S", "wchan": "do_wait", "threads": []}], "")
    _, _, sends = asked_closely(without, without)
    assert [each.rank for each in sends] == [0, 1]


def stack(name: str, frames: int, thread: str = "MainThread") -> dict[str, Any]:
    return {"name": thread, "frames": [[f"{name}_{n}", "train.py", n] for n in range(frames)]}


def with_stacks(*threads: dict[str, Any]) -> Dump:
    """As it comes over the wire."""
    program = {"pid": 1, "threads": [*threads]}
    return Dump(1, 1.0, [], json.loads(json.dumps([program, {"pid": 2}])), "")


def test_equal_stacks_of_many_ranks_are_held_once() -> None:
    answers = Answers()
    for rank in range(100):
        answers.keep(rank, with_stacks(stack("train", 20), stack("load", 20, "loader")))
    assert answers[99] == with_stacks(stack("train", 20), stack("load", 20, "loader"))
    held = [thread["frames"] for each in answers.values() for thread in each.processes[0].get("threads", ())]
    assert (len(held), len({id(frames) for frames in held})) == (200, 2)


def test_what_is_held_of_different_stacks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpulaunch.supervise.stalls.inquiry.MAX_FRAMES", 50)
    answers = Answers()
    for rank in range(10):
        answers.keep(rank, with_stacks(stack(f"rank_{rank}", 10), stack(f"loader_{rank}", 10, "loader")))
    lengths = [[len(thread["frames"]) for thread in answers[r].processes[0]["threads"]] for r in range(10)]
    assert lengths[:2] == [[10, 10]] * 2
    assert lengths[3:] == [[INNERMOST]] * 7
    answers.keep(10, with_stacks(stack("rank_0", 10)))  # which is known
    assert len(answers[10].processes[0]["threads"][0]["frames"]) == 10
