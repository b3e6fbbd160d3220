"""Streams a trace file of torch's profiler, so that a gigabyte needs a few megabytes of memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

CHUNK = 1 << 20
"""Characters per read."""

MAX_HEADER = 64 << 20
"""Maximum characters before the first event, and of a single event."""

_EVENTS = '"traceEvents"'


class TraceError(ValueError):
    """The file is not a trace, or is incomplete."""


def read(file: TextIO) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Return the trace's object without events, and an iterator over events.  Both raise TraceError."""
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
