"""Types of settings' values.  ``str`` formats a value as its setting parses it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostCount:
    """The minimum and maximum number of hosts of a job."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True)
class PortRange:
    """TCP ports from ``first`` to ``last``, both included."""

    first: int
    last: int

    @property
    def ports(self) -> range:
        """The ports as a range."""
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


@dataclass(frozen=True)
class StepRange:
    """Optimizer steps from ``first`` to ``last``, both included, counted from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True)
class Interval:
    """A number of optimizer steps, with an empty ``unit``, or a time in the unit ``s``, ``m`` or ``h``."""

    number: int
    unit: str = ""

    @property
    def steps(self) -> int | None:
        """The number of steps; None for a time."""
        return None if self.unit else self.number

    @property
    def seconds(self) -> float | None:
        """The time in seconds; None for a number of steps."""
        return self.number * {"s": 1.0, "m": 60.0, "h": 3600.0}[self.unit] if self.unit else None

    def __str__(self) -> str:
        return f"{self.number}{self.unit}"
