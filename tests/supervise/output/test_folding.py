"""Equal lines of many ranks become one line."""

from __future__ import annotations

import pytest

from cpulaunch.model.cores import CoreSet
from cpulaunch.supervise.output.folding import Fold


def folded(*said: tuple[int, str]) -> list[str]:
    fold = Fold()
    for rank, line in said:
        fold.add(rank, (1, line.encode()))
    return [f"[{ranks}] {line.decode()}" for (_, line), ranks in fold.take()]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ([(0, "a"), (1, "a"), (2, "a")], ["[0-2] a"]),
        ([(0, "a"), (1, "b")], ["[0] a", "[1] b"]),
        ([(0, "a"), (1, "b"), (1, "c"), (0, "d")], ["[0] a", "[1] b", "[1] c", "[0] d"]),
        ([(0, "a"), (0, "b"), (1, "a"), (1, "b")], ["[0-1] a", "[0-1] b"]),
        ([(0, "x"), (0, "a"), (1, "a")], ["[0] x", "[0-1] a"]),
        ([(0, "a"), (0, "a")], ["[0] a", "[0] a"]),
        ([(5, ""), (2, "")], ["[2,5] "]),
        ([], []),
    ],
)
def test_equal_lines_become_one_and_each_ranks_order_stays(
    said: list[tuple[int, str]], shown: list[str]
) -> None:
    assert folded(*said) == shown


def test_streams_are_not_mixed() -> None:
    fold = Fold()
    fold.add(0, (1, b"a"))
    fold.add(1, (2, b"a"))
    assert list(fold.take()) == [((1, b"a"), CoreSet([0])), ((2, b"a"), CoreSet([1]))]
