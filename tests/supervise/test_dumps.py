"""Asking all agents what their programs do: who is asked, and when the answers are complete."""

from __future__ import annotations

from cpulaunch.messages import AskDump, Dump
from cpulaunch.supervise.dumps import ANSWER_WITHIN, Dumps
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
