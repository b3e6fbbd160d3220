"""Inquiries to agents about their programs: the ranks that are asked, and when the answers are complete."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpulaunch.messages import AskDump, Dump
from cpulaunch.supervise.job.events import Send
from cpulaunch.supervise.stalls.inquiry import INNERMOST, Inquiry


def answer(request: int) -> Dump:
    return Dump(request, 1.0, [{"name": "0"}], [], "")


def test_an_inquiry_is_complete_when_all_have_answered() -> None:
    inquiry = Inquiry()
    question, sends = inquiry.ask([0, 1], 9.0, native=[1])
    assert sends == [Send(0, AskDump(1, False)), Send(1, AskDump(1, True))]
    inquiry.store_answer(0, answer(1), 5.0)
    inquiry.store_answer(1, answer(99), 5.0)
    assert not question.is_over(5.0)
    inquiry.store_answer(1, answer(1), 6.0)
    assert question.is_over(6.0)
    assert question.answers == {0: answer(1), 1: answer(1)}


def test_an_inquiry_does_not_wait_for_silent_or_ended_ranks() -> None:
    inquiry = Inquiry()
    question, _ = inquiry.ask([0, 1, 2], 9.0)
    inquiry.store_answer(0, answer(1), 1.0)
    inquiry.remove_rank(1)
    assert not question.is_over(8.9)
    assert question.is_over(9.0)
    inquiry.store_answer(2, answer(1), 9.0)  # too late
    assert question.answers.keys() == {0}


def test_each_inquiry_gets_its_own_answers() -> None:
    inquiry = Inquiry()
    first, _ = inquiry.ask([0], 9.0)
    second, sends = inquiry.ask([0], 9.0, fresh=True, ledgers=False)
    assert sends == [Send(0, AskDump(2, False, fresh=True))]
    inquiry.store_answer(0, answer(2), 1.0)
    assert (first.is_over(1.0), second.is_over(1.0)) == (False, True)
    assert second.answers[0].groups == []
    inquiry.store_answer(0, answer(1), 1.0)
    assert first.answers[0].groups == [{"name": "0"}]


def stack(name: str, frames: int, thread: str = "MainThread") -> dict[str, Any]:
    return {"name": thread, "frames": [[f"{name}_{n}", "train.py", n] for n in range(frames)]}


def with_stacks(*threads: dict[str, Any]) -> Dump:
    """Return an agent's answer as the launcher receives it, with these threads."""
    program = {"pid": 1, "threads": [*threads]}
    return Dump(1, 1.0, [], json.loads(json.dumps([program, {"pid": 2}])), "")


def test_equal_stacks_of_many_ranks_are_kept_once() -> None:
    question, _ = Inquiry().ask([], 9.0)
    answers = question.answers
    for rank in range(100):
        question.keep(rank, with_stacks(stack("train", 20), stack("load", 20, "loader")))
    assert answers[99] == with_stacks(stack("train", 20), stack("load", 20, "loader"))
    held = [thread["frames"] for each in answers.values() for thread in each.processes[0].get("threads", ())]
    assert (len(held), len({id(frames) for frames in held})) == (200, 2)


def test_the_memory_for_different_stacks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpulaunch.supervise.stalls.inquiry.MAX_FRAMES", 50)
    question, _ = Inquiry().ask([], 9.0)
    answers = question.answers
    for rank in range(10):
        question.keep(rank, with_stacks(stack(f"rank_{rank}", 10), stack(f"loader_{rank}", 10, "loader")))
    lengths = [[len(thread["frames"]) for thread in answers[r].processes[0]["threads"]] for r in range(10)]
    assert lengths[:2] == [[10, 10]] * 2
    assert lengths[3:] == [[INNERMOST]] * 7
    question.keep(10, with_stacks(stack("rank_0", 10)))  # a known stack
    assert len(answers[10].processes[0]["threads"][0]["frames"]) == 10
