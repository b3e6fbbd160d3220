"""CoreSet: lists of CPU numbers as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet

core_sets = st.sets(st.integers(0, 600), max_size=60).map(CoreSet)


@pytest.mark.parametrize(
    ("text", "folded", "count", "mask"),
    [
        ("", "", 0, "0"),
        ("7\n", "7", 1, "80"),
        ("0-13,28", "0-13,28", 15, "10003fff"),
        ("3,1,2", "1-3", 3, "e"),
        ("1-3,2-6", "1-6", 6, "7e"),
        (" 4 , 6-7 ", "4,6-7", 3, "d0"),
        ("0-6:2", "0,2,4,6", 4, "55"),
        ("007", "7", 1, "80"),
        ("0-27,56-83", "0-27,56-83", 56, "fffffff0000000fffffff"),
        ("65535", "65535", 1, "8" + "0" * 16383),
    ],
)
def test_a_list_is_parsed_and_shown_as_in_taskset(text: str, folded: str, count: int, mask: str) -> None:
    cores = CoreSet.parse(text)
    assert (str(cores), len(cores), cores.mask()) == (folded, count, mask)


@pytest.mark.parametrize(
    ("text", "part", "why"),
    [
        ("0-13,x", "x", "'x' in the list '0-13,x' is neither a number nor a range"),
        ("abc", "abc", "'abc' is neither a number nor a range"),
        ("1,,2", "", "'' in the list '1,,2' is neither a number nor a range"),
        ("3-", "3-", "'3-' is neither a number nor a range"),
        ("1-2-3", "1-2-3", "'1-2-3' is neither a number nor a range"),
        ("٣", "٣", "'٣' is neither a number nor a range"),
        ("4:2", "4:2", "'4:2' is neither a number nor a range"),
        ("5,9-7", "9-7", "'9-7' in the list '5,9-7' ends before it starts"),
        ("0-8:0", "0-8:0", "'0-8:0' has a step of 0"),
        ("0-1048576", "0-1048576", "'0-1048576' exceeds 1048575, the largest possible number"),
        ("9" * 5000, "9" * 5000, "exceeds 1048575"),
    ],
)
def test_a_wrong_list_is_an_error_with_the_faulty_part(text: str, part: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CoreSet.parse(text)
    assert caught.value.part == part
    assert why in str(caught.value)
    assert caught.value.hint == "A list of numbers looks like 0-13,28."


@pytest.mark.parametrize("number", [-1, 1 << 20])
def test_numbers_too_high_for_a_cpu_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match="not a CPU number"):
        CoreSet([number])


def test_equal_sets_are_equal_keys_but_tuples_are_not() -> None:
    assert {CoreSet([1, 2]): "x"}[CoreSet.parse("1-2")] == "x"
    assert CoreSet([1]) != (1,)
    assert repr(CoreSet([1, 2])) == "CoreSet('1-2')"


@given(core_sets)
def test_a_folded_list_round_trips(cores: CoreSet) -> None:
    assert CoreSet.parse(str(cores)) == cores
    assert CoreSet(cores) == cores
    assert int(cores.mask(), 16) == sum(1 << cpu for cpu in cores)


@given(core_sets, core_sets)
def test_operators_work_like_the_operators_of_sets(a: CoreSet, b: CoreSet) -> None:
    left, right = set(a), set(b)
    assert list(a | b) == sorted(left | right)
    assert list(a & b) == sorted(left & right)
    assert list(a - b) == sorted(left - right)
    assert (a <= b, a == b, bool(a), len(a)) == (left <= right, left == right, bool(left), len(left))
    assert [n in a for n in range(-1, 601)] == [n in left for n in range(-1, 601)]
