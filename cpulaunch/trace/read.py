"""Reads the file of torch's profiler piece by piece: a trace of a gigabyte takes a few megabytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

CHUNK = 1 << 20
"""Characters that are read at once."""

MAX_HEADER = 64 << 20
"""Characters before the first event: what the program has added is among them."""

_EVENTS = '"traceEvents"'


class TraceError(ValueError):
    """A file that is no trace, or not all of one."""


def read(file: TextIO) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """What stands before the events, and these, one after the other.  Both raise TraceError."""
    text = ""
    while (at := text.find(_EVENTS)) < 0 or "[" not in text[at:]:
        if not (more := file.read(CHUNK)) or len(text) > MAX_HEADER:
            raise TraceError("it has no events")
        text += more
    try:
        header = json.loads(text[:at].rstrip().rstrip(",") + "}")
    except ValueError:
        raise TraceError("it is not JSON") from None
    return header, _events(file, text[text.index("[", at) + 1 :])


def _events(file: TextIO, text: str) -> Iterator[dict[str, Any]]:
    decode = json.JSONDecoder().raw_decode
    at, ended = 0, False
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] == "]":
            return
        try:
            event, at = decode(text, at)
        except ValueError:
            if ended:
                raise TraceError("it ends early, or is not JSON") from None
            more = file.read(CHUNK)
            ended = not more
            text, at = text[at:] + more, 0
            if len(text) > MAX_HEADER:
                raise TraceError("it has an event without an end") from None
            continue
        if isinstance(event, dict):
            yield event
