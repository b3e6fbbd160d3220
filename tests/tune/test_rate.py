"""The rate of a trial, computed from the job's rows of telemetry."""

from __future__ import annotations

import pytest

from cpulaunch.tune.rate import MIN_ROWS, WARM_UP, Meter


def rows(rank: int, seconds: list[float], **more: float) -> list[dict[str, float]]:
    return [{"rank": rank, "step": n, "seconds": s, **more} for n, s in enumerate(seconds, 1)]


WARM = [9.0] * WARM_UP


def test_samples_of_all_ranks_are_added_and_the_first_steps_are_left_out() -> None:
    meter = Meter()
    for rank in range(2):
        meter.add(rows(rank, [*WARM, *[0.5] * MIN_ROWS], samples=8))
    rate = meter.rate(2)
    assert rate is not None
    assert (rate.per_second, rate.spread, rate.unit) == (32.0, 0.0, "samples")
    assert meter.seconds == 0.5 * MIN_ROWS


def test_a_rate_needs_enough_rows_of_every_rank() -> None:
    meter = Meter()
    meter.add(rows(0, [*WARM, *[0.5] * MIN_ROWS]))
    assert meter.rate(2) is None
    meter.add(rows(1, [*WARM, *[0.5] * (MIN_ROWS - 1)]))
    assert meter.rate(2) is None


def test_without_samples_the_steps_of_all_ranks_count() -> None:
    meter = Meter()
    meter.add(rows(0, [*WARM, *[0.25] * MIN_ROWS]))
    rate = meter.rate(1)
    assert rate is not None
    assert (rate.per_second, rate.unit) == (4.0, "steps")


def test_a_row_for_several_steps_counts_their_sums() -> None:
    meter = Meter()
    meter.add({"rank": 0, "step": 10 * n, "steps": 10, "seconds": 0.5} for n in range(1, 9))
    rate = meter.rate(1)
    assert rate is not None
    assert (rate.per_second, rate.unit) == (pytest.approx(20.0), "steps")


def test_the_spread_shrinks_with_the_number_of_rows() -> None:
    def spread(count: int) -> float:
        meter = Meter()
        meter.add(rows(0, [*WARM, *[0.4, 0.6] * count], samples=1))
        rate = meter.rate(1)
        assert rate is not None
        return rate.spread

    assert spread(50) == pytest.approx(spread(5) / 10**0.5, rel=0.1)
    assert spread(5) == pytest.approx(2 * 0.2 / 10**0.5, rel=0.1)  # two standard errors of 20 %


def test_other_rows_are_ignored() -> None:
    meter = Meter()
    meter.add([{"schema": 1}, {"rank": 0, "time": 1.0, "rss": 5}, *rows(0, [*WARM, *[0.5] * MIN_ROWS])])
    assert meter.rate(1) is not None
