"""The kinds of value that a setting may have: how each is read from text and from YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from cpulaunch import plugins
from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet


class Kind:
    """One kind of value.

    ``describe`` completes the sentence "expected …".  Both readers return the value, or raise
    ``ValueError`` where it does not fit; the caller adds the place and the description.
    """

    metavar = "VALUE"
    describe = "text"

    def from_text(self, text: str) -> Any:
        """The value that ``text``, from a flag or a variable, stands for."""
        raise NotImplementedError

    def expected(self, given: object) -> str:
        """``describe``, for an error about ``given``: with what is known only here and now."""
        return self.describe

    def to_text(self, value: Any) -> str:
        """A text that ``from_text`` reads as ``value``."""
        return str(value)

    def from_yaml(self, value: Any) -> Any:
        """The value that a YAML ``value`` stands for.  YAML's own scalars and text are both right."""
        if isinstance(value, str):
            return self.from_text(value)
        raise ValueError


class Text(Kind):
    """Any text that isn't empty."""

    def __init__(self, metavar: str = "TEXT", describe: str = "text") -> None:
        self.metavar, self.describe = metavar, describe

    def from_text(self, text: str) -> str:
        if not text.strip() or "\0" in text:
            raise ValueError
        return text

    def from_yaml(self, value: Any) -> str:
        # `cores: 4` and `node: 7` are numbers to YAML.
        return self.from_text(str(value) if type(value) is int else value if isinstance(value, str) else "")


class Numbers(Text):
    """A list of CPU or node numbers and ranges, as text, or ``auto``."""

    def __init__(self) -> None:
        super().__init__("LIST", "auto, or a list such as 0-13,28")

    def from_text(self, text: str) -> str:
        if text != "auto":
            _check_numbers(text)
        return text


class Switch(Kind):
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


class Choice(Kind):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.metavar = "|".join(words)
        self.describe = "one of " + ", ".join(words)

    def from_text(self, text: str) -> str:
        if text not in self.words:
            raise ValueError
        return text


class ChoiceOrPlugin(Choice):
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


class Destinations(Kind):
    """Where telemetry goes: words with commas between, such as ``tensorboard,prometheus:9100``."""

    metavar = "WHERE"
    describe = "file, none, or tensorboard and prometheus:PORT or prometheus:ADDRESS:PORT, each once"
    _prometheus = re.compile(r"prometheus:(?:(?P<address>\[[\da-f:]+\]|[^\s,:]+):)?(?P<port>\d{1,5})")

    def from_text(self, text: str) -> str:
        words = text.split(",")
        alone = text in ("file", "none")
        if not alone and not all(word in ("file", "tensorboard") or self.port_of(word) for word in words):
            raise ValueError
        if len({word.partition(":")[0] for word in words}) < len(words):
            raise ValueError  # each once
        return text

    @classmethod
    def port_of(cls, word: str) -> tuple[str, int] | None:
        """Address and port of ``prometheus:9100``, on loopback if no address is given."""
        found = cls._prometheus.fullmatch(word)
        if not found or not 0 < int(found["port"]) < 65536:
            return None
        return (found["address"] or "127.0.0.1").strip("[]"), int(found["port"])


MAX_DIGITS = 20
"""Characters that the text of a number may have: Python refuses to print one that is very long."""


def _is_long(given: object) -> bool:
    """Whether this is the text of a number that is too long; an int may be too long to be a text at all."""
    return (isinstance(given, int) and abs(given) >= 10**MAX_DIGITS) or len(str(given)) > MAX_DIGITS


class Number(Kind):
    """A whole number (or a decimal one) from ``minimum`` on, or one of a few words."""

    def __init__(
        self, minimum: int, *words: str, maximum: int | None = None, decimal: bool = False, metavar: str = "N"
    ) -> None:
        self.minimum, self.maximum, self.words, self.decimal = minimum, maximum, words, decimal
        self.metavar = "|".join((metavar, *words))
        span = f"from {minimum} to {maximum}" if maximum is not None else f"of at least {minimum}"
        number = f"a {'' if decimal else 'whole '}number" + (" of seconds" if metavar == "S" else "")
        self.describe = ", or ".join((f"{number} {span}", *words))

    def expected(self, given: object) -> str:
        return f"{self.describe}, in {MAX_DIGITS} digits at most" if _is_long(given) else self.describe

    def from_text(self, text: str) -> Any:
        if text in self.words:
            return text
        # `int` alone would take "1_000", and Arabic-Indic digits.
        if not text.isascii() or "_" in text or len(text) > MAX_DIGITS:
            raise ValueError
        return self._checked(float(text) if self.decimal else int(text))

    def from_yaml(self, value: Any) -> Any:
        if type(value) is int or (self.decimal and type(value) is float):
            return self._checked(value)
        return super().from_yaml(value)

    def _checked(self, number: float) -> float:
        if not self.minimum <= number <= (self.maximum if self.maximum is not None else number):
            raise ValueError  # which a NaN is, too
        if number == float("inf"):
            raise ValueError
        return int(number) if number == int(number) else number


class Nodes(Number):
    """How many hosts, at least and at most: ``3:4``, or one number for both; or one of a few words."""

    def __init__(self, *words: str) -> None:
        super().__init__(1, *words)
        self.metavar = "|".join(("N", "MIN:MAX", *words))
        self.describe = ", or ".join(
            ("a whole number of at least 1", "MIN:MAX, the smaller one first", *words)
        )

    def from_text(self, text: str) -> Any:
        least, colon, most = text.partition(":")
        if not colon:
            return super().from_text(text)
        first, last = super().from_text(least), super().from_text(most)
        if type(first) is not int or type(last) is not int or first > last:
            raise ValueError
        return first if first == last else f"{first}:{last}"


class Interval(Kind):
    """A number of steps, or a time as text; or one of a few words."""

    _units = {"s": 1, "m": 60, "h": 3600}  # noqa: RUF012

    def __init__(self, *words: str) -> None:
        self.words = words
        self.metavar = "|".join(("STEPS", "TIME", *words))
        self.describe = ", or ".join(
            ("a number of steps such as 500, or a time such as 90s, 10m or 2h", *words)
        )

    def from_text(self, text: str) -> int | str:
        if text in self.words:
            return text
        matched = re.fullmatch(r"(\d{1,9})([smh]?)", text, re.ASCII)
        if not matched or not int(matched[1]):
            raise ValueError
        return text if matched[2] else int(text)

    def from_yaml(self, value: Any) -> int | str:
        return self.from_text(str(value) if type(value) is int else value if isinstance(value, str) else "")

    @classmethod
    def seconds(cls, text: str) -> float:
        """The seconds of a time such as ``10m``."""
        return int(text[:-1]) * cls._units[text[-1]]


class Steps(Kind):
    """Optimizer steps as a range, in text, or ``none``.  The beginning of the first step can't be seen."""

    metavar = "FIRST-LAST|none"
    describe = "none, or steps such as 10-14: from 2 on, and 1000 of them at most"

    def from_text(self, text: str) -> str:
        if text != "none":
            matched = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text, re.ASCII)
            if not matched:
                raise ValueError
            first, last = int(matched[1]), int(matched[2] or matched[1])
            if not 2 <= first <= last < first + 1000:
                raise ValueError
        return text

    def from_yaml(self, value: Any) -> str:
        return self.from_text(str(value) if type(value) is int else value if isinstance(value, str) else "")


class Ranks(Kind):
    """Some of the ranks, as text; how many ranks there are is not known yet."""

    metavar = "RANKS|all|none"
    describe = "all, none, or a list such as 0,4-7"

    def from_text(self, text: str) -> str:
        if text not in ("all", "none"):
            _check_numbers(text)
        return text

    def from_yaml(self, value: Any) -> str:
        return self.from_text(str(value) if type(value) is int else value if isinstance(value, str) else "")


def _check_numbers(text: str) -> None:
    try:
        numbers = CoreSet.parse(text)
    except ConfigError:
        raise ValueError from None
    if not numbers:
        raise ValueError


class Words(Kind):
    """A list of arguments; a flag may be repeated, a variable is split as a shell would."""

    metavar = "ARG"
    describe = "a list of texts"

    def from_text(self, text: str) -> tuple[str, ...]:
        return tuple(shlex.split(text))

    def from_yaml(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(type(v) in (str, int, float) for v in value):
            return tuple(str(v) for v in value)
        raise ValueError


class Variables(Kind):
    """Environment variables, name → value."""

    metavar = "K=V"
    describe = "NAME=VALUE, or in YAML a mapping of names to text"

    def from_text(self, text: str) -> dict[str, str]:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError
        return self.from_yaml({name: value})

    def from_yaml(self, value: Any) -> dict[str, str]:
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
