"""How messages travel: as lines of JSON, whose sender proves that it knows the job's token."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from cpulaunch.messages import KINDS, Output, TracePiece, Unknown

MAX_LINE = 1 << 20
"""Bytes; a longer line is hostile, or broken."""

MAX_TEXT = 20_000
"""Characters of a text in a message, but for output.  JSON makes at most twelve bytes of each."""

MAX_OUTPUT = 1 << 16
"""Bytes of a program's output per message.  JSON makes at most six of each."""

MAX_KIND = 40
"""Characters of an unknown kind that are shown."""


class MessageError(ValueError):
    """A line that is no message, or one whose fields are not what its kind has."""


M = TypeVar("M")


def encode(message: NamedTuple, kinds: Mapping[Any, str] = KINDS) -> bytes:
    """One line.  Of a text that is too long the end is kept, as that of a traceback says most."""
    kind = kinds[type(message)]
    fields = message._asdict()
    if not isinstance(message, (Output, TracePiece)):
        fields = {name: _cut(value) for name, value in fields.items()}
    line = json.dumps({"type": kind, **fields}, separators=(",", ":")).encode()
    if len(line) > MAX_LINE:
        raise MessageError(f"{kind} of {len(line)} bytes")
    return line + b"\n"


def decode(line: bytes, kinds: Mapping[str, type[M]]) -> M | Unknown:
    """The message of one line, which is one of ``kinds``, or ``Unknown``.

    Fields that the kind doesn't have are passed over, and those that it lacks have their defaults.  Raises
    MessageError where there is none.
    """
    try:
        raw = json.loads(line)
    except RecursionError:
        raise MessageError("nested too deeply") from None
    except ValueError:
        raise MessageError("not JSON") from None
    if not isinstance(raw, dict) or not isinstance(kind := raw.get("type"), str):
        raise MessageError("not a message")
    if kind not in kinds:
        return Unknown(kind[:MAX_KIND])
    cls = kinds[kind]
    values = {}
    for name, expected in cls.__annotations__.items():
        if name not in raw:
            if name in getattr(cls, "_field_defaults", ()):
                continue
            raise MessageError(f"{kind} without {name}")
        if not _is(raw[name], expected):
            raise MessageError(f"{kind} whose {name} is {str(raw[name])[:MAX_KIND]!r}")
        values[name] = raw[name]
    return cls(**values)


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value[-MAX_TEXT:]
    return [_cut(each) for each in value] if isinstance(value, list) else value


def _is(value: object, expected: Any) -> bool:
    """Whether a value of JSON has the type that an annotation of this module names."""
    if type(value) is expected or expected is Any:  # the first is quick: thousands of agents beat
        return True
    if expected is float:
        return type(value) in (int, float)
    if getattr(expected, "__origin__", None) is dict:
        return type(value) is dict
    alternatives = getattr(expected, "__args__", ())
    if isinstance(expected, type(int | None)):
        return any(_is(value, each) for each in alternatives)
    if alternatives:  # of a list's elements
        return type(value) is list and all(_is(each, alternatives[0]) for each in value)
    return False  # isinstance would take True for an int


def pack(data: bytes) -> str:
    """Any bytes as text that JSON carries: UTF-8 stays readable, all else survives."""
    return data.decode("utf-8", "surrogateescape")


def unpack(text: str) -> bytes:
    """What ``pack`` packed."""
    return text.encode("utf-8", "surrogateescape")


def proof(token: str, role: str, salt: str, rank: int) -> str:
    """What only a holder of the job's token can say to ``salt``."""
    import hmac  # takes an agent 2 ms, which its program needn't wait for

    said = f"{role} {rank} {salt}".encode(errors="surrogatepass")  # as a stranger's salt may have such
    return hmac.digest(token.encode(), said, "sha256").hex()


def observers_token(token: str) -> str:
    """By which those who only ask prove themselves: knowing it, nobody can pose as an agent of the job."""
    return proof(token, "observers", "", 0)


def same(a: str, b: str) -> bool:
    """Whether a proof is right, in constant time."""
    import hmac

    return a.isascii() and hmac.compare_digest(a, b)


class Lines:
    """Cuts a stream of bytes into lines, of at most ``limit`` bytes each."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self.limit = limit
        self.rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that ``data`` completes, without their ends, up to the first that is too long.

        MessageError: there is one.
        """
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._check(line)
            yield line
        self._check(self.rest)

    def _check(self, line: bytes) -> None:
        if len(line) > self.limit:
            raise MessageError(f"a line of more than {self.limit} bytes")
