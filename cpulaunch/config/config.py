"""The merged settings, as a value."""

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
    """A setting's value, in the types of JSON, and its origin: a row of a plan's settings."""

    key: str
    value: Any
    origin: Origin

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"key": self.key, "value": self.value, "origin": self.origin.text}


class Settings(Table):
    """Every setting's value, such as ``settings.hosts.nnodes``, and its origin."""

    def value(self, setting: Setting[T]) -> T:
        """Return the value of ``setting``, for callers that know the setting only at run time."""
        given = self.given.get(setting)
        return cast(T, given.value) if given else setting.default

    def origin(self, setting: Setting[Any]) -> Origin:
        """Return where this value comes from."""
        given = self.given.get(setting)
        return given.origin if given else DEFAULT

    def is_set(self, setting: Setting[Any]) -> bool:
        """Return whether this value is set anywhere, even if to the default."""
        return self.origin(setting) != DEFAULT

    def where(self, setting: Setting[Any]) -> str:
        """Return the setting's name in errors, such as ``"ccl.worker_count (cpulaunch.yaml:7)"``."""
        return f"{setting.key} ({self.origin(setting)})"

    def put(self: S, setting: Setting[T], value: T, origin: Origin = DEFAULT) -> S:
        """Return these settings with another value for one of them."""
        return replace(self, given={**self.given, setting: Given(value, origin)})

    def reset(self: S, *settings: Setting[Any]) -> S:
        """Return these settings with some of them at their defaults."""
        kept = {setting: given for setting, given in self.given.items() if setting not in settings}
        return replace(self, given=kept)

    def rows(self, found: Mapping[Setting[Any], Any]) -> Iterator[SettingRow]:
        """Yield every setting, with the values that were ``found`` for some, in the types of JSON."""
        for setting in SETTINGS.values():
            origin = self.origin(setting)
            # For instances, planning changes values that nobody has set.
            value = setting.kind.to_yaml(self.value(setting) if self.is_set(setting) else setting.default)
            if setting in found and found[setting] != value:
                value, origin = found[setting], DETECTED
            yield SettingRow(setting.key, value, origin)


@dataclass(frozen=True)
class Config(Settings):
    """The settings, and the environment that they were read in."""

    environ: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    warnings: tuple[str, ...] = ()
