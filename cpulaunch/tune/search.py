"""Varies one setting after the other, and keeps each value that is measured as faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple, Protocol

from cpulaunch.tune.rate import Rate
from cpulaunch.tune.space import Values

COARSE, FINE = 0.1, 0.03
"""Required precision of a rate, as a fraction: in a first trial, and in a comparison of two candidates."""

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
    """Return the best candidate, or ``default`` if no candidate is significantly faster.

    The stages are repeated until a pass changes nothing, because the best value of a setting may depend on
    settings of later stages.
    """
    best = default
    while True:
        before = best.values
        for candidates in stages:
            best = _best_of_stage(best, list(candidates(best.values)), measure)
        if best.values == before:
            return best


def _best_of_stage(best: Trial, candidates: list[Values], measure: Measure) -> Trial:
    """Return the best trial of one stage.

    The faster half of the candidates runs again, until one is left.  This one is compared with ``best``.
    """
    trials: list[Trial] = []
    for values in candidates:
        trial = measure(values, COARSE, best.rate.least if best.rate else 0.0)
        if trial and trial.rate and (best.rate is None or trial.rate.most > best.rate.least):
            trials.append(trial)
    while len(trials) > 1:
        half = _by_rate(trials)[: len(trials) // 2]
        trials = [_repeat(each, measure) for each in half] if len(half) > 1 else half
    if not trials or best.rate is None:
        return trials[0] if trials else best
    winner = _repeat(trials[0], measure)
    best = _repeat(best, measure)
    return winner if winner.rate and best.rate and winner.rate.least > best.rate.most else best


def _repeat(trial: Trial, measure: Measure) -> Trial:
    """Run a trial once more, and return it with the rate of both runs; unchanged if no time is left."""
    again = measure(trial.values, FINE)
    if again is None or again.rate is None or trial.rate is None:
        return trial
    return trial._replace(rate=trial.rate.joined(again.rate))


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
