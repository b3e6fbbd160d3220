"""Encodes messages as lines of JSON, decodes them, and authenticates their sender."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from cpulaunch.messages import KINDS, Output, TracePiece, Unknown

MAX_LINE = 1 << 20
"""Maximum bytes of a line."""

MAX_TEXT = 20_000
"""Maximum characters of a string in a message, except in output.  JSON takes up to twelve bytes for each."""

MAX_OUTPUT = 1 << 16
"""Maximum bytes of output in a message.  JSON takes up to six bytes for each."""

MAX_KIND = 40
"""Maximum characters of an unknown kind or a wrong value in an error."""


class MessageError(ValueError):
    """A line is not a valid message."""


M = TypeVar("M")


def encode(message: NamedTuple, kinds: Mapping[Any, str] = KINDS) -> bytes:
    """Encode a message as one line.  Raises MessageError if the line is longer than ``MAX_LINE``.

    Strings longer than ``MAX_TEXT`` lose their beginning, as the end of a traceback is more useful.
    """
    kind = kinds[type(message)]
    fields = message._asdict()
    if not isinstance(message, (Output, TracePiece)):
        fields = {name: _cut(value) for name, value in fields.items()}
    line = json.dumps({"type": kind, **fields}, separators=(",", ":")).encode()
    if len(line) > MAX_LINE:
        raise MessageError(f"{kind} of {len(line)} bytes")
    return line + b"\n"


def decode(line: bytes, kinds: Mapping[str, type[M]]) -> M | Unknown:
    """Decode one line into a message of one of ``kinds``, or ``Unknown``.

    Unknown fields are ignored, and missing fields get their defaults.  Raises MessageError if the line is not
    a message, if a field without a default is missing, or if a field has a wrong type.
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
    """Return whether a JSON value has the type of an annotation in ``messages``."""
    if type(value) is expected or expected is Any:  # fast path for the beats of thousands of agents
        return True
    if expected is float:
        return type(value) in (int, float)
    if getattr(expected, "__origin__", None) is dict:
        return type(value) is dict
    alternatives = getattr(expected, "__args__", ())
    if isinstance(expected, type(int | None)):
        return any(_is(value, each) for each in alternatives)
    if alternatives:  # a list, with the type of its elements
        return type(value) is list and all(_is(each, alternatives[0]) for each in value)
    return False  # isinstance would take True for an int


def pack(data: bytes) -> str:
    """Encode bytes as text for JSON.  UTF-8 stays readable, and other bytes become surrogates."""
    return data.decode("utf-8", "surrogateescape")


def unpack(text: str) -> bytes:
    """Undo ``pack``."""
    return text.encode("utf-8", "surrogateescape")


def proof(token: str, role: str, salt: str, rank: int) -> str:
    """Compute the answer to the challenge ``salt``, which proves knowledge of ``token``."""
    import hmac  # takes 2 ms, so an agent imports it after it has started the program

    text = f"{role} {rank} {salt}".encode(errors="surrogatepass")  # a stranger's salt may have surrogates
    return hmac.digest(token.encode(), text, "sha256").hex()


def observers_token(token: str) -> str:
    """Derive the token of observers, which does not authenticate agents."""
    return proof(token, "observers", "", 0)


def groups_key(token: str) -> str:
    """Derive the key with which ranks authenticate each other."""
    return proof(token, "groups", "", 0)


def same(a: str, b: str) -> bool:
    """Compare two proofs in constant time."""
    import hmac

    return a.isascii() and hmac.compare_digest(a, b)


class Outbox:
    """Sent messages that the other end has not acknowledged; ``size`` is their total in bytes.

    A new connection sends them again.
    """

    def __init__(self) -> None:
        self.size = 0
        self._lines: list[bytes] = []
        self._acknowledged = 0  # number of messages

    def add(self, line: bytes) -> bytes:
        """Keep a message until it is acknowledged, and return it."""
        self._lines.append(line)
        self.size += len(line)
        return line

    def acknowledged(self, count: int) -> None:
        """Drop the first ``count`` of all added messages.  Raises MessageError if ``count`` is impossible."""
        new = count - self._acknowledged
        if not 0 <= new <= len(self._lines):
            raise MessageError(f"{count} messages acknowledged, of {self._acknowledged + len(self._lines)}")
        self.size -= sum(map(len, self._lines[:new]))
        del self._lines[:new]
        self._acknowledged = count

    def rest(self) -> bytes:
        """Return the messages that were not acknowledged, in order."""
        return b"".join(self._lines)


class Lines:
    """Splits a stream of bytes into lines of at most ``limit`` bytes each."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self.limit = limit
        self.rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that ``data`` completes, without newlines.

        Raises MessageError at the first line that is longer than ``limit``.
        """
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._check(line)
            yield line
        self._check(self.rest)

    def _check(self, line: bytes) -> None:
        if len(line) > self.limit:
            raise MessageError(f"a line of more than {self.limit} bytes")
