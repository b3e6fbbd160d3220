"""The origins of values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Source(IntEnum):
    """The sources of values, from the weakest to the strongest."""

    DEFAULT = 0
    DETECTED = 1
    SITE = 2
    FILE = 3
    ENVIRONMENT = 4
    COMMAND_LINE = 5


@dataclass(frozen=True)
class Origin:
    """The source of one value, and its name in messages, such as ``--nnodes`` or ``cpulaunch.yaml:7``.

    ``option``: the command-line option without its dashes; empty for other sources.
    ``variables``: the environment variables that contribute to the value.
    """

    source: Source
    text: str
    option: str = ""
    variables: tuple[str, ...] = ()

    @classmethod
    def of_option(cls, option: str) -> Origin:
        """Return the origin of a value given by an option such as ``--nnodes`` or ``--set hosts.nnodes``."""
        return cls(Source.COMMAND_LINE, option, option=option.partition(" ")[0].lstrip("-"))

    @classmethod
    def of_variable(cls, name: str) -> Origin:
        """Return the origin of a value in an environment variable."""
        return cls(Source.ENVIRONMENT, f"${name}", variables=(name,))

    def __str__(self) -> str:
        return self.text

    def and_then(self, other: Origin) -> Origin:
        """Return the origin of a value that merges values from this origin and from ``other``."""
        if self in (DEFAULT, other):
            return other
        return Origin(
            max(self.source, other.source),
            f"{self}, {other}",
            variables=(*self.variables, *other.variables),
        )


DEFAULT = Origin(Source.DEFAULT, "default")
DETECTED = Origin(Source.DETECTED, "detected")
"""Origin of a value that cpulaunch has detected or decided, for a setting such as ``auto``."""
