"""Asking all agents what their programs do: who is asked, and when the answers are complete."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpulaunch.messages import AskDump, Dump
from cpulaunch.supervise.dumps import ANSWER_WITHIN, INNERMOST, Answers, Dumps
from cpulaunch.supervise.events import Send


def answer(request: int) -> Dump:
    return Dump(request, 1.0, [], [], "")


def test_a_round_is_over_when_all_have_answered() -> None:
    dumps = Dumps()
    opened, sends = dumps.ask([0, 1], True, 5.0)
    assert sends == [Send(rank, AskDump(1, True)) for rank in (0, 1)]
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
    assert dumps.take(1.0) == [other]


def test_nobody_to_ask_is_an_answer() -> None:
    dumps = Dumps()
    opened, sends = dumps.ask([], True, 0.0)
    assert (sends, dumps.take(0.0)) == ([], [opened])


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
    monkeypatch.setattr("cpulaunch.supervise.dumps.MAX_FRAMES", 50)
    answers = Answers()
    for rank in range(10):
        answers.keep(rank, with_stacks(stack(f"rank_{rank}", 10), stack(f"loader_{rank}", 10, "loader")))
    lengths = [[len(thread["frames"]) for thread in answers[r].processes[0]["threads"]] for r in range(10)]
    assert lengths[:2] == [[10, 10]] * 2
    assert lengths[3:] == [[INNERMOST]] * 7
    answers.keep(10, with_stacks(stack("rank_0", 10)))  # which is known
    assert len(answers[10].processes[0]["threads"][0]["frames"]) == 10
