"""Settings on their way to a rank: written into its environment by the planner, read there by the rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpulaunch.config.config import Config
from cpulaunch.config.settings import SETTINGS
from cpulaunch.errors import UsageError


def rank_settings(config: Config, decided: Mapping[str, Any]) -> dict[str, str]:
    """The variables that tell ranks the settings ``decided`` (by key), and all that are not defaults."""
    told = {}
    for key, setting in SETTINGS.items():
        name = setting.rank_variable
        # One that is in the environment comes from a job in which this launcher runs.
        if name and (key in decided or config[key] != setting.default or name in config.environ):
            told[name] = setting.kind.to_text(decided.get(key, config[key]))
    return told


def rank_setting(key: str, environ: Mapping[str, str]) -> Any:
    """The value of a setting in a rank; its default where the rank was told nothing.

    Raises UsageError where its variable holds what isn't a value of this setting.
    """
    setting = SETTINGS[key]
    text = environ.get(setting.rank_variable or "")
    if not text:
        return setting.default
    if text in setting.decided:
        return text
    try:
        return setting.kind.from_text(text)
    except ValueError:
        raise UsageError(
            f"{setting.rank_variable} is {text!r}: expected {setting.kind.expected(text)}"
        ) from None
