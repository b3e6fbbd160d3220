"""Kinds of values of settings: how they are read from text and from YAML, and written."""

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
Word = TypeVar("Word", bound=str)


class Kind(Generic[T]):
    """One kind of value.

    ``describe`` completes the sentence "expected …".  All readers return the value, or raise ``ValueError``
    if it does not fit; the caller adds the place and the description.
    """

    metavar = "VALUE"
    describe = "text"

    def from_text(self, text: str) -> T:
        """Return the value of ``text``, from a flag."""
        raise NotImplementedError

    def from_line(self, text: str) -> T:
        """Return the value of ``text``, a whole environment variable or answer."""
        return self.from_text(text)

    def expected(self, given: object) -> str:
        """Return ``describe`` for an error about ``given``, with details known only at run time."""
        return self.describe

    def to_text(self, value: T) -> str:
        """Return a text that ``from_text`` reads as ``value``."""
        return str(value)

    def from_yaml(self, value: Any) -> T:
        """Return the value of a YAML ``value``: a text, or what only YAML considers a number, such as 4."""
        if type(value) is int:
            value = str(value)
        if isinstance(value, str):
            return self.from_text(value)
        raise ValueError

    def to_yaml(self, value: T) -> Any:
        """Return ``value`` in the types of YAML and JSON, as ``from_yaml`` reads it."""
        return value if isinstance(value, (str, int, float)) else str(value)


class Text(Kind[str]):
    """Any text that isn't empty."""

    def __init__(self, metavar: str = "TEXT", describe: str = "text") -> None:
        self.metavar, self.describe = metavar, describe

    def from_text(self, text: str) -> str:
        if not text.strip() or "\0" in text:
            raise ValueError
        return text


class Numbers(Kind["CoreSet | Word"]):
    """A list of numbers and ranges, of CPUs, NUMA nodes or ranks; or one of a few words."""

    def __init__(self, metavar: str, example: str, *words: Word) -> None:
        self.metavar, self.words = metavar, words
        self.describe = ", ".join((*words, f"or a list such as {example}"))

    def from_text(self, text: str) -> CoreSet | Word:
        for word in self.words:
            if word == text:
                return word
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

    def expected(self, given: object) -> str:
        names = self._installed()
        return f"{self.describe}; installed: {', '.join(names) or 'none'}"

    def _installed(self) -> list[str]:
        return [entry.name for entry in plugins.entry_points(self.group)]


@dataclass(frozen=True)
class Sinks:
    """Destinations of a job's telemetry besides the file in the job's directory.

    ``prometheus``: the address and the port at which Prometheus scrapes it.
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
    """Destinations of telemetry: words separated by commas, such as ``tensorboard,prometheus:9100``."""

    metavar = "WHERE"
    describe = "file, none, or tensorboard and prometheus:PORT or prometheus:ADDRESS:PORT, each once"
    _prometheus = re.compile(r"prometheus:(?:(?P<address>\[[\da-f:]+\]|[^\s,:]+):)?(?P<port>\d{1,5})")

    def from_text(self, text: str) -> Sinks | Literal["none"]:
        if text == "none":
            return "none"
        words = text.split(",")
        if len({word.partition(":")[0] for word in words}) < len(words):
            raise ValueError  # each once
        prometheus = None
        for word in words:
            if word not in ("file", "tensorboard"):
                prometheus = self._address(word)
        return Sinks("tensorboard" in words, prometheus)

    def _address(self, word: str) -> tuple[str, int]:
        """Return address and port of ``prometheus:9100``, on loopback if no address is given."""
        found = self._prometheus.fullmatch(word)
        if not found or not 0 < int(found["port"]) < 65536:
            raise ValueError
        return (found["address"] or LOOPBACK).strip("[]"), int(found["port"])


MAX_DIGITS = 20
"""Maximum characters of a number's text: Python refuses to print a very long number."""


def _is_long(given: object) -> bool:
    """Return whether a number's text is too long; an int may be too long to have a text."""
    return (isinstance(given, int) and abs(given) >= 10**MAX_DIGITS) or len(str(given)) > MAX_DIGITS


class Number(Kind[T]):
    """A whole number from ``minimum`` on, or one of a few words, all of the type ``T``."""

    metavar = "N"
    number = "a whole number"

    def __init__(self, minimum: int, *words: T, maximum: int | None = None, metavar: str = "") -> None:
        self.minimum, self.maximum, self.words = minimum, maximum, tuple(map(str, words))
        self.metavar = "|".join((metavar or self.metavar, *self.words))
        span = f"from {minimum} to {maximum}" if maximum is not None else f"of at least {minimum}"
        self.describe = ", or ".join((f"{self.number} {span}", *self.words))

    def expected(self, given: object) -> str:
        return f"{self.describe}, in {MAX_DIGITS} digits at most" if _is_long(given) else self.describe

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
            raise ValueError  # also for NaN
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


class Nodes(Kind["HostCount | Word"]):
    """A minimum and maximum number of hosts: ``3:4``, or one number for both; or one of a few words."""

    def __init__(self, *words: Word) -> None:
        self.words = words
        self.metavar = "|".join(("N", "MIN:MAX", *words))
        self.describe = ", or ".join(
            ("a whole number of at least 1", "MIN:MAX, the smaller one first", *words)
        )
        self._number: Number[int] = Number(1)

    def expected(self, given: object) -> str:
        return f"{self.describe}, in {MAX_DIGITS} digits at most" if _is_long(given) else self.describe

    def from_text(self, text: str) -> HostCount | Word:
        for word in self.words:
            if word == text:
                return word
        least, colon, most = text.partition(":")
        first = self._number.from_text(least)
        last = self._number.from_text(most) if colon else first
        if first > last:
            raise ValueError
        return HostCount(first, last)

    def to_yaml(self, value: HostCount | Word) -> Any:
        return value.least if isinstance(value, HostCount) and value.least == value.most else str(value)


class Every(Kind["Interval | Word"]):
    """An interval as a number of steps or a time; or one of a few words."""

    def __init__(self, *words: Word) -> None:
        self.words = words
        self.metavar = "|".join(("STEPS", "TIME", *words))
        self.describe = ", or ".join(
            ("a number of steps such as 500, or a time such as 90s, 10m or 2h", *words)
        )

    def from_text(self, text: str) -> Interval | Word:
        for word in self.words:
            if word == text:
                return word
        matched = re.fullmatch(r"(\d{1,9})([smh]?)", text, re.ASCII)
        if not matched or not int(matched[1]):
            raise ValueError
        return Interval(int(matched[1]), matched[2])

    def to_yaml(self, value: Interval | Word) -> Any:
        return value.number if isinstance(value, Interval) and not value.unit else str(value)


class Ports(Kind["PortRange | Word"]):
    """A range of TCP ports, or one of a few words."""

    def __init__(self, *words: Word) -> None:
        self.words = words
        self.metavar = "|".join(("A-B", *words))
        self.describe = ", or ".join(("ports such as 20000-20099, within 1024-65535", *words))

    def from_text(self, text: str) -> PortRange | Word:
        for word in self.words:
            if word == text:
                return word
        matched = re.fullmatch(r"(\d{4,5})-(\d{4,5})", text, re.ASCII)
        if not matched or not 1024 <= int(matched[1]) <= int(matched[2]) <= 65535:
            raise ValueError
        return PortRange(int(matched[1]), int(matched[2]))


class Steps(Kind["StepRange | Literal['none']"]):
    """Optimizer steps as a range, or ``none``.  The beginning of the first step can't be seen."""

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
    """A list of arguments: a flag adds one, a line is split as by a shell."""

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
    """Environment variables, name → value: a flag adds one, a line is split as by a shell."""

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
                content = str(content).lower()  # `FLAG: true` means the word
            if not isinstance(content, (str, int, float)) or "\0" in str(content):
                raise ValueError
            result[name] = str(content)
        return result

    def to_yaml(self, value: Mapping[str, str]) -> dict[str, str]:
        return dict(value)
