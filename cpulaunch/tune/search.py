"""Successive halving: coarse trials of all candidates, then finer trials of the faster half."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple, Protocol

from cpulaunch.tune.rate import Rate
from cpulaunch.tune.space import Values

COARSE, FINE = 0.1, 0.03
"""Required precision of a rate, as a fraction: to drop the slower half, and to choose the winner."""

CONFIRMATIONS = 3
"""Number of final runs of the winner and of the default settings, in turn."""


class Trial(NamedTuple):
    """One run with the settings ``values``: its rate, or the reason ``why`` it has none."""

    values: Values
    rate: Rate | None
    why: str = ""
    seconds: float = 0.0


class Measure(Protocol):
    """Runs a trial until its rate is known within ``tolerance``, or is certainly below ``to_beat``.

    Returns None if no time is left.
    """

    def __call__(self, values: Values, tolerance: float, to_beat: float = 0.0) -> Trial | None: ...


class Found(NamedTuple):
    """The ``winner``, and its rate divided by the rate of the default settings in each confirmation.

    ``default_failed``: the default settings have no rate to compare with.
    """

    winner: Trial
    ratios: tuple[float, ...] = ()
    default_failed: bool = False

    @property
    def is_faster(self) -> bool:
        """Whether the winner was faster than the default in each confirmation, or the default failed."""
        return self.default_failed or (len(self.ratios) == CONFIRMATIONS and min(self.ratios) > 1)

    @property
    def ratio(self) -> float:
        """The median of the ratios; 1 if nothing was compared."""
        return median(self.ratios) if self.ratios else 1.0


def search(default: Trial, stages: Sequence[Callable[[Values], Iterator[Values]]], measure: Measure) -> Trial:
    """Return the best candidate of all stages, or ``default`` if no candidate is significantly faster."""
    best = default
    for candidates in stages:
        best = _halve(best, list(candidates(best.values)), measure)
    return best


def _halve(best: Trial, candidates: list[Values], measure: Measure) -> Trial:
    """Return the best trial of one stage."""
    trials: list[Trial] = []
    for values in candidates:
        trial = measure(values, COARSE, best.rate.least if best.rate else 0.0)
        if trial and trial.rate and (best.rate is None or trial.rate.most > best.rate.least):
            trials.append(trial)
    tolerance = COARSE
    while trials and tolerance > FINE:
        tolerance = max(FINE, tolerance / 2)
        trials = [_refine(each, tolerance, measure) for each in _by_rate(trials)[: -(-len(trials) // 2)]]
    winner = next(iter(_by_rate(trials)), None)
    if winner is None or best.rate is None:
        return winner or best
    best = _refine(best, FINE, measure)
    return winner if winner.rate and best.rate and winner.rate.least > best.rate.most else best


def _refine(trial: Trial, tolerance: float, measure: Measure) -> Trial:
    """Repeat a trial, unless its rate is precise enough."""
    if trial.rate is None or trial.rate.spread <= tolerance:
        return trial
    again = measure(trial.values, tolerance)
    return again if again and again.rate else trial


def _by_rate(trials: list[Trial]) -> list[Trial]:
    """Sort by rate.  Among trials that may be as fast as the fastest, fewer changed settings come first."""
    fastest = sorted(trials, key=_per_second, reverse=True)
    close = [
        each for each in fastest if each.rate and fastest[0].rate and each.rate.most >= fastest[0].rate.least
    ]
    return [*sorted(close, key=lambda each: len(each.values)), *fastest[len(close) :]]


def _per_second(trial: Trial) -> float:
    return trial.rate.per_second if trial.rate else 0.0


def confirm(winner: Trial, default: Trial, measure: Measure) -> Found:
    """Run the winner and the default in turn."""
    if default.rate is None:
        return Found(winner, default_failed=True)
    ratios: list[float] = []
    while winner.values != default.values and len(ratios) < CONFIRMATIONS:
        before, after = measure(default.values, FINE), measure(winner.values, FINE)
        if not (before and before.rate and after and after.rate):
            break
        ratios.append(after.rate.per_second / before.rate.per_second)
    return Found(winner, tuple(ratios))
