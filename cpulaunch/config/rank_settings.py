"""Passes settings to a rank: the planner writes them into its environment, and the rank reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SETTINGS
from cpulaunch.errors import UsageError

T = TypeVar("T")


def rank_settings(config: Config, decided: Mapping[Setting[Any], Any]) -> dict[str, str]:
    """Return the variables for the settings ``decided``, and for all that are not defaults."""
    told = {}
    for setting in SETTINGS.values():
        name, value = setting.rank_variable, decided.get(setting, config.value(setting))
        # A variable in the environment comes from an enclosing job, in which this launcher runs.
        if name and (setting in decided or value != setting.default or name in config.environ):
            told[name] = setting.kind.to_text(value)
    return told


def rank_setting(setting: Setting[T], environ: Mapping[str, str]) -> T:
    """Return the value of a setting in a rank; its default if the rank got none.

    Raises UsageError if its variable holds no valid value of this setting.
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
