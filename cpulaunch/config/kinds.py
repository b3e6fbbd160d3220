"""The kinds of values that settings have; each kind parses text and YAML, and formats its values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

from cpulaunch import plugins
from cpulaunch.config.values import HostCount, Interval, PortRange, StepRange
from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet

LOOPBACK = "127.0.0.1"

T = TypeVar("T")
V = TypeVar("V")
Word = TypeVar("Word", bound=str)


class Kind(Generic[T]):
    """One kind of value.

    ``describe`` completes the sentence "expected …".  The ``from_…`` methods raise ValueError for an invalid
    value; their caller adds the place and the description to the error.
    """

    metavar = "VALUE"
    describe = "text"

    def from_text(self, text: str) -> T:
        """Parse the text of an option."""
        raise NotImplementedError

    def from_line(self, text: str) -> T:
        """Parse the text of an environment variable, or of an answer in the wizard."""
        return self.from_text(text)

    def expected(self) -> str:
        """Return the description for an error, with details known only at run time."""
        return self.describe

    def to_text(self, value: T) -> str:
        """Format ``value`` so that ``from_text`` parses it."""
        return str(value)

    def from_yaml(self, value: Any) -> T:
        """Parse a value that YAML has loaded."""
        if type(value) is int:
            value = str(value)
        if isinstance(value, str):
            return self.from_text(value)
        raise ValueError

    def to_yaml(self, value: T) -> Any:
        """Convert ``value`` to a type of YAML and JSON, so that ``from_yaml`` parses it."""
        return value if isinstance(value, (str, int, float)) else str(value)


class Text(Kind[str]):
    """Any text that isn't empty."""

    def __init__(self, metavar: str = "TEXT", describe: str = "text") -> None:
        self.metavar, self.describe = metavar, describe

    def from_text(self, text: str) -> str:
        if not text.strip() or "\0" in text:
            raise ValueError
        return text


class OrWord(Kind["V | Word"], Generic[V, Word]):
    """A value that `_parse` reads, or one of a few ``words``."""

    def __init__(self, metavar: str, describe: str, *words: Word) -> None:
        self.words = words
        self.metavar = "|".join((metavar, *words))
        self.describe = ", or ".join((describe, *words))

    def from_text(self, text: str) -> V | Word:
        for word in self.words:
            if word == text:
                return word
        return self._parse(text)

    def _parse(self, text: str) -> V:
        raise NotImplementedError


class Numbers(OrWord[CoreSet, Word]):
    """A list of numbers and ranges, of CPUs, NUMA nodes or ranks; or one of a few words."""

    def __init__(self, metavar: str, example: str, *words: Word) -> None:
        super().__init__("", "", *words)
        self.metavar = metavar
        self.describe = ", ".join((*words, f"or a list such as {example}"))

    def _parse(self, text: str) -> CoreSet:
        try:
            numbers = CoreSet.parse(text)
        except ConfigError:
            raise ValueError from None
        if not numbers:
            raise ValueError
        return numbers


class Switch(Kind[bool]):
    """True or false."""

    metavar = ""
    describe = "true or false"
    _words = {  # noqa: RUF012
        **dict.fromkeys(("true", "yes", "on", "1"), True),
        **dict.fromkeys(("false", "no", "off", "0"), False),
    }

    def from_text(self, text: str) -> bool:
        try:
            return self._words[text.lower()]
        except KeyError:
            raise ValueError from None

    def to_text(self, value: bool) -> str:
        return str(int(value))

    def from_yaml(self, value: Any) -> bool:
        return value if isinstance(value, bool) else super().from_yaml(value)


class Choice(Kind[Word]):
    """One of a few words."""

    def __init__(self, *words: Word) -> None:
        self.words = words
        self.metavar = "|".join(words)
        self.describe = "one of " + ", ".join(words)

    def from_text(self, text: str) -> Word:
        for word in self.words:
            if word == text:
                return word
        raise ValueError


class ChoiceOrPlugin(Choice[str]):
    """One of a few words, or the name of an installed plug-in: an entry point of ``group``."""

    def __init__(self, group: str, *words: str) -> None:
        super().__init__(*words)
        self.group = group
        self.metavar += "|NAME"
        self.describe += f", or the name of a plug-in (an entry point of {group})"

    def from_text(self, text: str) -> str:
        if text not in self.words and text not in self._installed():
            raise ValueError
        return text

    def expected(self) -> str:
        names = self._installed()
        return f"{self.describe}; installed: {', '.join(names) or 'none'}"

    def _installed(self) -> list[str]:
        return [entry.name for entry in plugins.entry_points(self.group)]


@dataclass(frozen=True)
class Sinks:
    """Destinations of telemetry, apart from the file in the job's directory.

    ``prometheus``: the address and port where Prometheus scrapes the launcher.
    """

    tensorboard: bool = False
    prometheus: tuple[str, int] | None = None

    def __str__(self) -> str:
        words = ["tensorboard"] if self.tensorboard else []
        if self.prometheus:
            address, port = self.prometheus
            shown = f"[{address}]" if ":" in address else address
            words.append(f"prometheus:{port}" if address == LOOPBACK else f"prometheus:{shown}:{port}")
        return ",".join(words) or "file"


class Destinations(Kind["Sinks | Literal['none']"]):
    """Destinations of telemetry, separated by commas: ``tensorboard,prometheus:9100``."""

    metavar = "WHERE"
    describe = "file, none, or tensorboard and prometheus:PORT or prometheus:ADDRESS:PORT, each once"
    _prometheus = re.compile(r"prometheus:(?:(?P<address>\[[\da-f:]+\]|[^\s,:]+):)?(?P<port>\d{1,5})")

    def from_text(self, text: str) -> Sinks | Literal["none"]:
        if text == "none":
            return "none"
        words = text.split(",")
        if len({word.partition(":")[0] for word in words}) < len(words):
            raise ValueError  # a destination is repeated
        prometheus = None
        for word in words:
            if word not in ("file", "tensorboard"):
                prometheus = self._address(word)
        return Sinks("tensorboard" in words, prometheus)

    def _address(self, word: str) -> tuple[str, int]:
        """Return the address (default: loopback) and the port of ``prometheus:9100``."""
        found = self._prometheus.fullmatch(word)
        if not found or not 0 < int(found["port"]) < 65536:
            raise ValueError
        return (found["address"] or LOOPBACK).strip("[]"), int(found["port"])


MAX_DIGITS = 20
"""Maximum characters of a number's text.  Python refuses to print much longer numbers."""


class Number(Kind[T]):
    """A whole number of at least ``minimum``, or one of a few words; ``T`` is the type of both."""

    metavar = "N"
    number = "a whole number"

    def __init__(self, minimum: int, *words: T, maximum: int | None = None, metavar: str = "") -> None:
        self.minimum, self.maximum, self.words = minimum, maximum, tuple(map(str, words))
        self.metavar = "|".join((metavar or self.metavar, *self.words))
        span = f"from {minimum} to {maximum}" if maximum is not None else f"of at least {minimum}"
        self.describe = ", or ".join((f"{self.number} {span}", *self.words))

    def from_text(self, text: str) -> T:
        if text in self.words:
            return cast(T, text)
        # `int` alone would accept "1_000", and Arabic-Indic digits.
        if not text.isascii() or "_" in text or len(text) > MAX_DIGITS:
            raise ValueError
        return self._checked(self._number(text))

    def _number(self, text: str) -> float:
        return int(text)

    def _checked(self, number: float) -> T:
        if not self.minimum <= number <= (self.maximum if self.maximum is not None else number):
            raise ValueError  # NaN fails this comparison, too
        return cast(T, number)


class Seconds(Number[T]):
    """A number of seconds, with or without decimals."""

    metavar = "S"
    number = "a number of seconds"

    def from_yaml(self, value: Any) -> T:
        return self._checked(value) if type(value) is float else super().from_yaml(value)

    def _number(self, text: str) -> float:
        return float(text)

    def _checked(self, number: float) -> T:
        if number == float("inf"):
            raise ValueError
        return super()._checked(int(number) if number == int(number) else number)


class Nodes(OrWord[HostCount, Word]):
    """A minimum and maximum number of hosts: ``3:4``, or one number for both; or one of a few words."""

    _number: Number[int] = Number(1)

    def __init__(self, *words: Word) -> None:
        expected = "a whole number of at least 1, or MIN:MAX, the smaller one first"
        super().__init__("N|MIN:MAX", expected, *words)

    def _parse(self, text: str) -> HostCount:
        least, colon, most = text.partition(":")
        first = self._number.from_text(least)
        last = self._number.from_text(most) if colon else first
        if first > last:
            raise ValueError
        return HostCount(first, last)

    def to_yaml(self, value: HostCount | Word) -> Any:
        return value.least if isinstance(value, HostCount) and value.least == value.most else str(value)


class Every(OrWord[Interval, Word]):
    """An interval, which is a number of steps or a time; or one of a few words."""

    def __init__(self, *words: Word) -> None:
        expected = "a number of steps such as 500, or a time such as 90s, 10m or 2h"
        super().__init__("STEPS|TIME", expected, *words)

    def _parse(self, text: str) -> Interval:
        matched = re.fullmatch(r"(\d{1,9})([smh]?)", text, re.ASCII)
        if not matched or not int(matched[1]):
            raise ValueError
        return Interval(int(matched[1]), matched[2])

    def to_yaml(self, value: Interval | Word) -> Any:
        return value.number if isinstance(value, Interval) and not value.unit else str(value)


class Ports(OrWord[PortRange, Word]):
    """A range of TCP ports, or one of a few words."""

    def __init__(self, *words: Word) -> None:
        super().__init__("A-B", "ports such as 20000-20099, within 1024-65535", *words)

    def _parse(self, text: str) -> PortRange:
        matched = re.fullmatch(r"(\d{4,5})-(\d{4,5})", text, re.ASCII)
        if not matched or not 1024 <= int(matched[1]) <= int(matched[2]) <= 65535:
            raise ValueError
        return PortRange(int(matched[1]), int(matched[2]))


class Steps(Kind["StepRange | Literal['none']"]):
    """A range of optimizer steps, or ``none``.  The first step can't be traced: nothing marks its start."""

    metavar = "FIRST-LAST|none"
    describe = "none, or steps such as 10-14: from 2 on, and 1000 of them at most"

    def from_text(self, text: str) -> StepRange | Literal["none"]:
        if text == "none":
            return "none"
        matched = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text, re.ASCII)
        if not matched:
            raise ValueError
        first, last = int(matched[1]), int(matched[2] or matched[1])
        if not 2 <= first <= last < first + 1000:
            raise ValueError
        return StepRange(first, last)


class Words(Kind["tuple[str, ...]"]):
    """A list of arguments.  An option adds one; the text of a variable is split as a shell would."""

    describe = "a list of texts"

    def __init__(self, metavar: str) -> None:
        self.metavar = metavar

    def from_text(self, text: str) -> tuple[str, ...]:
        return (text,)

    def from_line(self, text: str) -> tuple[str, ...]:
        return tuple(shlex.split(text))

    def from_yaml(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(type(v) in (str, int, float) for v in value):
            return tuple(str(v) for v in value)
        raise ValueError

    def to_yaml(self, value: tuple[str, ...]) -> list[str]:
        return list(value)


class Variables(Kind["Mapping[str, str]"]):
    """Environment variables, name → value.  An option adds one; a variable is split as a shell would."""

    metavar = "K=V"
    describe = "NAME=VALUE, or in YAML a mapping of names to text"

    def from_text(self, text: str) -> Mapping[str, str]:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError
        return self.from_yaml({name: value})

    def from_line(self, text: str) -> Mapping[str, str]:
        return {name: value for word in shlex.split(text) for name, value in self.from_text(word).items()}

    def from_yaml(self, value: Any) -> Mapping[str, str]:
        if not isinstance(value, Mapping):
            raise ValueError
        result = {}
        for name, content in value.items():
            if not isinstance(name, str) or not name or "=" in name or "\0" in name:
                raise ValueError
            if isinstance(content, bool):
                content = str(content).lower()  # `FLAG: true` stands for the text "true"
            if not isinstance(content, (str, int, float)) or "\0" in str(content):
                raise ValueError
            result[name] = str(content)
        return result

    def to_yaml(self, value: Mapping[str, str]) -> dict[str, str]:
        return dict(value)
