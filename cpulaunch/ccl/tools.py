"""Runs compilers and linkers, which can be stopped together."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cpulaunch.errors import HostError

TOOL_LIMIT = 900.0
"""Maximum seconds that a compiler may take for one file."""

_UNDEFINED = re.compile(r"undefined reference to [`']([^']+)'")  # GNU ld and gold
_KILLED = "signal terminated program"  # printed by GCC's driver when its compiler was killed


class CompilerError(HostError):
    """A compiler failed, or its output does not load.  A retry would fail, too."""


class Tools:
    """Processes of tools, which any thread can start or stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped: HostError | None = None

    def stop(self, why: HostError) -> HostError:
        """Terminate all tools, and refuse to start more.  Return the first caller's ``why``."""
        with self._lock:
            self._stopped = self._stopped or why
            for process in self._running:
                process.terminate()  # g++ ends its own compiler
            return self._stopped

    @contextmanager
    def running(self, argv: list[str]) -> Iterator[subprocess.Popen[str]]:
        """Run a process within the context.  Raises HostError if it can't start."""
        pipe = subprocess.PIPE
        with self._lock:
            if self._stopped:
                raise self._stopped
            try:
                process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True)
            except OSError as e:
                hint = "It is in the compiler's package, or in binutils."
                raise HostError(f"{argv[0]} can't be run: {e.strerror}", hint=hint) from None
            self._running.add(process)
        try:
            with process:
                try:
                    yield process
                except BaseException:
                    process.kill()
                    raise
        finally:
            with self._lock:
                self._running.discard(process)


def run_tool(argv: list[str], tools: Tools | None = None) -> str:
    """Run a tool as one of ``tools``, and return its output.

    Raises CompilerError with the tool's errors if it fails, and HostError if it was killed, for example
    because memory ran out.
    """
    with (tools or Tools()).running(argv) as process:
        out, error = process.communicate(timeout=TOOL_LIMIT)
    missing = sorted(set(_UNDEFINED.findall(error)))
    if process.returncode != 0 and missing:
        raise CompilerError(
            f"the linker found no definition of {', '.join(missing)}",
            hint="csrc/oneccl/shim.cpp defines the symbols that oneCCL's static library needs and lacks.",
        )
    if process.returncode != 0:
        lines = [line for line in error.splitlines() if "error" in line or "undefined" in line]
        shown = "\n  ".join((lines or error.splitlines())[:5])
        known = "g++ 11 and newer can compile it for torch 2.8 and 2.13"
        was_killed = process.returncode < 0 or _KILLED in error
        raise (HostError if was_killed else CompilerError)(
            f"the compiler failed:\n  {shown}", hint=f"{known}; the command was: {' '.join(argv)}"
        )
    return out
