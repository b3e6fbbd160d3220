"""Passes settings to ranks in environment variables: the planner writes them, and a rank reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SETTINGS
from cpulaunch.errors import UsageError

T = TypeVar("T")


def rank_settings(config: Config, decided: Mapping[Setting[Any], Any]) -> dict[str, str]:
    """Return the variables of the settings that the plan has ``decided`` and of all that are not defaults."""
    env = {}
    for setting in SETTINGS.values():
        name, value = setting.rank_variable, decided.get(setting, config.value(setting))
        # A variable that is already set comes from an enclosing job; override it.
        if name and (setting in decided or value != setting.default or name in config.environ):
            env[name] = setting.kind.to_text(value)
    return env


def rank_setting(setting: Setting[T], environ: Mapping[str, str]) -> T:
    """Return the value of a setting in a rank, or its default if its variable is not set.

    Raises UsageError if the variable is invalid.
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
        raise UsageError(f"{setting.rank_variable} is {text!r}: expected {setting.kind.expected()}") from None
