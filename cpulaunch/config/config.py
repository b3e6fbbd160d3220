"""The merged settings of a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from cpulaunch.config.origin import DEFAULT, DETECTED, Origin
from cpulaunch.config.setting import Given, Setting
from cpulaunch.config.settings import SETTINGS, Table

T = TypeVar("T")
S = TypeVar("S", bound="Settings")


class SettingRow(NamedTuple):
    """A row of a plan's settings: the setting's key, its value in a type of JSON, and its origin."""

    key: str
    value: Any
    origin: Origin

    def to_json(self) -> dict[str, Any]:
        """Return the row of ``plan.json``."""
        return {"key": self.key, "value": self.value, "origin": self.origin.text}


class Settings(Table):
    """The values of all settings, such as ``settings.hosts.nnodes``, and their origins."""

    def value(self, setting: Setting[T]) -> T:
        """Return the value of ``setting``, for callers that know the setting only at run time."""
        given = self.given.get(setting)
        return cast(T, given.value) if given else setting.default

    def origin(self, setting: Setting[Any]) -> Origin:
        """Return the origin of the setting's value."""
        given = self.given.get(setting)
        return given.origin if given else DEFAULT

    def is_set(self, setting: Setting[Any]) -> bool:
        """Return whether any source sets this value; it may equal the default."""
        return self.origin(setting) != DEFAULT

    def where(self, setting: Setting[Any]) -> str:
        """Return the setting's name for errors: ``"ccl.worker_count (cpulaunch.yaml:7)"``."""
        return f"{setting.key} ({self.origin(setting)})"

    def put(self: S, setting: Setting[T], value: T, origin: Origin = DEFAULT) -> S:
        """Return a copy in which ``setting`` has another value."""
        return replace(self, given={**self.given, setting: Given(value, origin)})

    def reset(self: S, *settings: Setting[Any]) -> S:
        """Return a copy in which ``settings`` have their defaults."""
        kept = {setting: given for setting, given in self.given.items() if setting not in settings}
        return replace(self, given=kept)

    def rows(self, found: Mapping[Setting[Any], Any]) -> Iterator[SettingRow]:
        """Yield a row for each setting.  ``found`` holds detected and decided values, as JSON types."""
        for setting in SETTINGS.values():
            origin = self.origin(setting)
            # The planner of instances changes values that no source sets.
            value = setting.kind.to_yaml(self.value(setting) if self.is_set(setting) else setting.default)
            if setting in found and found[setting] != value:
                value, origin = found[setting], DETECTED
            yield SettingRow(setting.key, value, origin)


@dataclass(frozen=True)
class Config(Settings):
    """The settings, the environment and the YAML file that they come from, and warnings for the user."""

    environ: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    warnings: tuple[str, ...] = ()
