"""Formats the trials of a tuning as text, as JSON, and as a YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cpulaunch.config.config import Config
from cpulaunch.config.origin import Source
from cpulaunch.config.write import shown_value, yaml_text
from cpulaunch.tune.search import Found, Trial
from cpulaunch.tune.space import Values

SCHEMA = 1

DEFAULT = "(default)"
"""Name of the trial that changes no settings."""


def title(values: Values) -> str:
    """Format a candidate's values, such as ``precision fp32, allocator glibc``."""
    shown = (f"{setting.name} {shown_value(setting, value)}" for setting, value in values.items())
    return ", ".join(shown) or DEFAULT


def text(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield the lines of a table: trials by their rate, then trials that failed, with the reason."""
    default = _default(trials)
    width = max((len(title(trial.values)) for trial in trials), default=0)
    known = sorted(_trials_with_rates(trials), key=lambda pair: -pair[1].per_second)
    unit = f"{known[0][1].unit}/s" if known else "samples/s"
    yield f"{'settings':{width}}  {unit:>12}  {'÷ default':>9}  spread"
    for trial, rate in known:
        ratio = f"{rate.per_second / default:.2f}" if default else "–"
        yield f"{title(trial.values):{width}}  {rate.per_second:>12,.1f}  {ratio:>9}  ±{rate.spread:.0%}"
    for trial in trials:
        if trial.rate is None:
            yield f"{title(trial.values):{width}}  failed: {trial.why}"


def as_json(trials: Sequence[Trial], found: Found | None) -> dict[str, Any]:
    """Return the document of ``--format json``.  ``winner`` is null unless it was confirmed as faster."""
    default = _default(trials)
    winner = found.winner if found and found.is_faster else None
    return {
        "schema": SCHEMA,
        "trials": [
            {
                "settings": _plain(trial.values),
                "per_second": trial.rate and trial.rate.per_second,
                "unit": trial.rate and trial.rate.unit,
                "spread": trial.rate and trial.rate.spread,
                "ratio": trial.rate.per_second / default if trial.rate and default else None,
                "failed": trial.why or None,
                "seconds": trial.seconds,
            }
            for trial in trials
        ],
        "winner": _plain(winner.values) if winner else None,
        "ratios": list(found.ratios) if found else [],
    }


def as_yaml(trials: Sequence[Trial], winner: Values, config: Config) -> str:
    """Return a settings file: the current file's and the winner's settings, and the table in comments."""
    given = {s: value for s, (value, origin) in config.given.items() if origin.source is Source.FILE}
    heading = ["Written by `cpulaunch tune`, which measured:", *text(trials), ""]
    return yaml_text({**given, **winner}, heading)


def _default(trials: Sequence[Trial]) -> float:
    """Return the first rate of the default settings; 0 if they have none."""
    return next((rate.per_second for trial, rate in _trials_with_rates(trials) if not trial.values), 0.0)


def _trials_with_rates(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Any]]:
    return ((trial, trial.rate) for trial in trials if trial.rate)


def _plain(values: Values) -> dict[str, Any]:
    return {setting.key: setting.kind.to_yaml(value) for setting, value in values.items()}
