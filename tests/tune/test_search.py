"""The search, with invented rates for each candidate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cpulaunch.config.config import Config
from cpulaunch.tune.rate import Rate
from cpulaunch.tune.search import COARSE, CONFIRMATIONS, FINE, Trial, confirm, search
from cpulaunch.tune.space import Values

RANKS, ALLOCATOR = Config.hosts.nproc_per_node, Config.cpu.allocator
NAMES = ("tcmalloc", "glibc", "jemalloc", "default")


class Machine:
    """Candidates with known rates, in samples per second for each value.

    ``trials`` is the largest number of trials; ``run`` has the trials so far.
    """

    def __init__(self, speeds: dict[str, float], trials: int = 1000) -> None:
        self.speeds, self.left = speeds, trials
        self.run: list[tuple[Values, float]] = []

    def __call__(self, values: Values, tolerance: float, to_beat: float = 0.0) -> Trial | None:
        if not self.left:
            return None
        self.left -= 1
        self.run.append((values, tolerance))
        speed = 100.0
        for value in values.values():
            speed *= self.speeds[str(value)]
        return Trial(values, Rate(speed, tolerance, "samples") if speed else None, "" if speed else "died")


def ranks(best: Values) -> Iterator[Values]:
    return ({**best, RANKS: count} for count in (1, 2, 4, 8))


def allocators(best: Values) -> Iterator[Values]:
    return ({**best, ALLOCATOR: name} for name in NAMES)


def found(machine: Machine) -> Trial:
    default = machine({}, FINE)
    assert default is not None
    return search(default, [ranks, allocators], machine)


SPEEDS = {"1": 0.5, "2": 1.5, "4": 2.0, "8": 0.0, **dict.fromkeys(NAMES, 1.0), "glibc": 1.2}


def test_each_stage_starts_from_the_best_candidate_of_the_previous_stage() -> None:
    machine = Machine(SPEEDS)
    assert found(machine).values == {RANKS: 4, ALLOCATOR: "glibc"}
    first = next(values for values, _ in machine.run if ALLOCATOR in values)
    assert first[RANKS] == 4


def test_only_the_faster_half_is_measured_again() -> None:
    machine = Machine(SPEEDS)
    default = machine({}, FINE)
    assert default is not None
    search(default, [lambda best: iter(() if best else ranks(best))], machine)
    again = [values[RANKS] for values, tolerance in machine.run if values and tolerance < COARSE]
    assert again == [4]  # of 2 and 4, which are faster than the default


def test_later_values_may_change_the_choice_of_earlier_ones() -> None:
    class Crossed(Machine):
        """Candidates of which four ranks are faster only with glibc."""

        def __call__(self, values: Values, tolerance: float, to_beat: float = 0.0) -> Trial | None:
            with_both = values.get(RANKS) == 4 and values.get(ALLOCATOR) == "glibc"
            self.speeds["4"] = 3.0 if with_both else 0.5
            return super().__call__(values, tolerance, to_beat)

    assert found(Crossed({**SPEEDS, "2": 1.0})).values == {RANKS: 4, ALLOCATOR: "glibc"}


def test_two_runs_with_different_rates_have_a_wide_spread() -> None:
    joined = Rate(100.0, 0.01, "samples").joined(Rate(120.0, 0.01, "samples"))
    assert (joined.per_second, joined.spread) == (110.0, pytest.approx(10 / 110))
    equal = Rate(100.0, 0.04, "samples").joined(Rate(100.0, 0.04, "samples"))
    assert equal.spread == pytest.approx(0.04 / 2**0.5)


def test_a_candidate_within_the_spread_does_not_win() -> None:
    assert found(Machine({**dict.fromkeys(SPEEDS, 1.0), "4": 1.02})).values == {}


def test_the_fewest_settings_win_among_equal_candidates() -> None:
    def both(best: Values) -> Iterator[Values]:
        return iter(({RANKS: 4, ALLOCATOR: "glibc"}, {RANKS: 4, ALLOCATOR: "default"}, {RANKS: 4}))

    machine = Machine({**SPEEDS, "glibc": 1.01})
    default = machine({}, FINE)
    assert default is not None
    assert search(default, [both], machine).values == {RANKS: 4}


def test_the_best_so_far_is_measured_as_exactly_as_its_contender() -> None:
    machine = Machine({**SPEEDS, "4": 1.12, "2": 0.9})
    default = machine({}, COARSE)
    assert default is not None
    assert search(default, [ranks], machine).values == {RANKS: 4}
    assert ({}, FINE) in machine.run


def test_candidates_that_fail_lose() -> None:
    assert found(Machine(dict.fromkeys(SPEEDS, 0.0))).values == {}


def test_the_best_candidate_so_far_wins_when_the_time_is_up() -> None:
    assert found(Machine(SPEEDS, trials=1)).values == {}
    assert found(Machine(SPEEDS, trials=8)).values == {RANKS: 4}


def test_a_failing_default_loses_to_any_other_candidate() -> None:
    default = Trial({}, None, "out of memory")
    winner = search(default, [ranks], Machine(SPEEDS))
    assert winner.values == {RANKS: 4}
    assert confirm(winner, default, Machine(SPEEDS)).is_faster


def test_a_winner_must_be_faster_each_time() -> None:
    default = Trial({}, Rate(100.0, FINE, "samples"))
    winner = Trial({RANKS: 4}, Rate(200.0, FINE, "samples"))
    machine = Machine(SPEEDS)
    confirmed = confirm(winner, default, machine)
    assert (confirmed.is_faster, confirmed.ratio, len(machine.run)) == (True, 2.0, 2 * CONFIRMATIONS)
    assert not confirm(winner, default, Machine({**SPEEDS, "4": 0.99})).is_faster
    assert not confirm(winner, default, Machine(SPEEDS, trials=5)).is_faster
    assert not confirm(default, default, machine).is_faster
