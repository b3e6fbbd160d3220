"""The steps and ranks of a job that can be traced."""

from __future__ import annotations

import pytest

from cpulaunch.messages import Beat
from cpulaunch.model.names import INSTANCE, Names
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.supervise.profiling.request import Sample, first_step, why_untraceable


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        ([(100, 0.0)], [(100, 0.5)], 102),
        ([(100, 0.0), (101, 0.0)], [(105, 0.5), (104, 0.5)], 117),
        ([(0, 0.0)], [(500, 0.5)], 1502),
        ([], [], 2),
    ],
)
def test_the_first_traced_step_is_ahead_of_all_ranks(
    before: list[tuple[int, float]], after: list[tuple[int, float]], first: int
) -> None:
    """The fastest rank makes steps until the request arrives, and one more while its profiler starts."""
    assert first_step([Sample(*each) for each in before], [Sample(*each) for each in after]) == first


def ranks(*beats: Beat | None) -> list[Rank]:
    made = [Rank(number, "h", RankState.RUNNING) for number in range(len(beats))]
    for rank, beat in zip(made, beats, strict=True):
        rank.beat = beat
    return made


GOOD = Beat(steps=3, expects_steps=True, keeps_ledger=True)


@pytest.mark.parametrize(
    ("beats", "wanted", "steps", "why"),
    [
        ([GOOD, GOOD], [0, 1], 5, ""),
        ([GOOD, None], [0], 5, ""),
        ([GOOD], [0], 0, "the number of steps must be from 1 to 1000, got 0"),
        ([GOOD], [0], 1001, "the number of steps must be from 1 to 1000, got 1001"),
        ([GOOD], [0, 1], 5, "there is no rank 1: the only rank is 0"),
        ([GOOD], [-3, 0], 5, "there is no rank -3"),
        ([GOOD, None], [0, 1], 5, "rank 1 can't be traced yet: its program hasn't imported torch"),
        (
            [Beat(keeps_ledger=True)],
            [0],
            5,
            "rank 0 can't be traced yet: it hasn't created an optimizer of torch (while it starts, ask",
        ),
        ([GOOD] * 65, list(range(65)), 5, "at most 64 ranks can be traced, got 65: choose some with --ranks"),
    ],
)
def test_steps_and_ranks_that_can_be_traced(
    beats: list[Beat | None], wanted: list[int], steps: int, why: str
) -> None:
    said = why_untraceable(ranks(*beats), wanted, steps, current=True)
    assert said.startswith(why) if why else said == ""


def test_a_rank_that_has_ended_can_not_be_traced() -> None:
    (rank,) = ranks(GOOD)
    rank.state = RankState.LOST
    assert why_untraceable([rank], [0], 5) == "rank 0 on h can't be traced: lost"


def test_instances_have_their_own_numbers() -> None:
    why = why_untraceable(ranks(GOOD), [1], 5, Names(INSTANCE, 3))
    assert why == "there is no instance 4: the only instance is 3"
