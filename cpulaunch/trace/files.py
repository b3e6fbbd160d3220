"""Merges the ranks' trace files in the working directory into one file, with a summary."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from cpulaunch.trace.advice import advice
from cpulaunch.trace.figures import as_json, figures
from cpulaunch.trace.merge import Source, SourceError, document, merge
from cpulaunch.trace.read import TraceError
from cpulaunch.trace.text import Summary, summary

LEVEL = 3
"""gzip's compression level."""


def main() -> int:
    """Carry out the order on stdin, and print the summary.  Both are JSON.  Returns the exit code."""
    gc.disable()  # nearly all objects live until the end
    try:
        made = merge_files(json.load(sys.stdin))
        print(json.dumps({"brief": made.brief, "text": made.text}))
    except (OSError, EOFError, TraceError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


def merge_files(order: Mapping[str, Any]) -> Summary:
    """Merge traces into STEM.json.gz, and write their summary to STEM.txt and STEM.summary.json.

    ``order`` has the keys ``stem``, ``ranks`` (fields of ``Source``), ``noun`` (rank or instance) and
    ``missing`` (rank → why it has no trace).  Files that are not traces are reported as missing.  Raises
    TraceError if no rank has a trace.
    """
    missing = {int(rank): why for rank, why in order["missing"].items()}
    while True:
        sources: list[Source] = []
        with contextlib.ExitStack() as stack:
            for each in order["ranks"]:
                if each["rank"] in missing:
                    continue
                packed = stack.enter_context(gzip.open(each["file"]))
                file = stack.enter_context(io.TextIOWrapper(packed, "utf-8", "replace"))
                try:
                    source = Source(each["rank"], each["host"], file, each["clock"], each["uncertain"])
                    sources.append(source)
                except SourceError as e:
                    missing[e.rank] = f"its file is not a trace: {e}"
            if not sources:
                raise TraceError("; ".join(f"{order['noun']} {rank}: {why}" for rank, why in missing.items()))
            try:
                return _write(order["stem"], sources, missing, order["noun"])
            except SourceError as e:
                missing[e.rank] = f"its trace is incomplete: {e}"


def _write(stem: str, sources: list[Source], missing: Mapping[int, str], noun: str) -> Summary:
    part = f"{stem}.part"
    try:
        with (
            _private(part) as raw,
            gzip.GzipFile(f"{stem}.json", "wb", LEVEL, raw) as packed,
            io.TextIOWrapper(io.BufferedWriter(packed, 1 << 20), "utf-8", "replace") as file,
        ):
            write, end = document(file)
            found = figures(merge(sources, write, noun), noun)
            end()
        os.rename(part, f"{stem}.json.gz")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    made = summary(found, missing)
    texts = [each._asdict() for each in advice(found)]
    with _private(f"{stem}.summary.json") as raw:
        raw.write(json.dumps({**as_json(found), "advice": texts, "missing": missing}, indent=1).encode())
    with _private(f"{stem}.txt") as raw:
        raw.write(made.text.encode())
    return made


def _private(name: str) -> io.BufferedWriter:
    """Open a file for writing that only its owner can read."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(fd, "wb")
