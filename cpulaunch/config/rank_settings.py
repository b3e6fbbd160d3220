"""Settings on their way to a rank: written into its environment by the planner, read there by the rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SETTINGS
from cpulaunch.errors import UsageError

T = TypeVar("T")


def rank_settings(config: Config, decided: Mapping[Setting[Any], Any]) -> dict[str, str]:
    """The variables that tell ranks the settings ``decided``, and all that are not defaults."""
    told = {}
    for setting in SETTINGS.values():
        name, value = setting.rank_variable, decided.get(setting, config.value(setting))
        # One that is in the environment comes from a job in which this launcher runs.
        if name and (setting in decided or value != setting.default or name in config.environ):
            told[name] = setting.kind.to_text(value)
    return told


def rank_setting(setting: Setting[T], environ: Mapping[str, str]) -> T:
    """The value of a setting in a rank; its default where the rank was told nothing.

    Raises UsageError where its variable holds what isn't a value of this setting.
    """
    text = environ.get(setting.rank_variable or "")
    if not text:
        return setting.default
    for value in setting.decided:
        if value == text:
            return value
    try:
        return setting.kind.from_text(text)
    except ValueError:
        raise UsageError(
            f"{setting.rank_variable} is {text!r}: expected {setting.kind.expected(text)}"
        ) from None
