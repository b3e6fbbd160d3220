"""Reads files named by the user, with limits on size and time, and locates the user's cache."""

from __future__ import annotations

import errno
import os
import select
import stat
from pathlib import Path

SETTINGS_LIMIT = 1 << 20
"""Maximum bytes of a settings file."""

HOSTFILE_LIMIT = 16 << 20
"""Maximum bytes of a hostfile; 100,000 hosts with comments take less."""

FACTS_LIMIT = 256 << 20
"""Maximum bytes of a facts file; 1,024 different hosts take a quarter of it."""

WRITER_WITHIN = 1.0
"""Seconds within which a writer must open a pipe."""

SILENT_FOR = 30.0
"""Seconds that the writer of a pipe may pause."""


def read_user_file(path: Path, limit: int) -> bytes:
    """Read ``path``.  Raises OSError if it has more than ``limit`` bytes, or is a pipe without a writer."""
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            content = _read_pipe(file.fileno(), limit + 1)
        else:
            os.set_blocking(file.fileno(), True)
            content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit >> 20} MiB")
    return content


def cache_home() -> Path:
    """Return the directory of the user's caches: XDG_CACHE_HOME, else ~/.cache.

    It may be missing or not writable.  For a user without a home, as in a container, "/" counts as the home.
    """
    home = os.path.expanduser("~")
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join("/" if home == "~" else home, ".cache"))


def _read_pipe(fd: int, limit: int) -> bytes:
    """Read a pipe, such as the shell's ``<(…)``, up to its end or ``limit`` bytes.  Raises OSError."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    content, patience = b"", WRITER_WITHIN
    while len(content) < limit:
        ready = poll.poll(1000 * patience)
        try:
            data = os.read(fd, limit - len(content))
        except BlockingIOError:  # the pipe has a writer
            if not ready and patience == SILENT_FOR:
                raise OSError(
                    errno.ETIMEDOUT, f"it is a pipe, and nothing came for {SILENT_FOR:g} s"
                ) from None
            data = None
        if data == b"" and not ready:
            raise OSError(errno.EPIPE, "it is a pipe that no process writes to")
        if data == b"":
            break
        content, patience = content + (data or b""), SILENT_FOR
    return content
