"""The user's files: reading one that they have named, and where theirs are that we keep.

Of a named file, whatever it is, never more is read than such a file can be.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from pathlib import Path

SETTINGS_LIMIT = 1 << 20
"""Bytes of a file of settings."""

HOSTFILE_LIMIT = 16 << 20
"""Bytes of a hostfile: 100,000 hosts with comments take less."""

FACTS_LIMIT = 256 << 20
"""Bytes of a facts file: 1,024 hosts that all differ take a quarter of it."""

WRITER_WITHIN = 1.0
"""Seconds in which somebody has to open a pipe for writing."""

SILENT_FOR = 30.0
"""Seconds in which whoever writes to a pipe has to write more."""


def read_user_file(path: Path, limit: int) -> bytes:
    """The content of ``path``, of ``limit`` bytes at most.

    OSError where it can't be read, is larger, or is a pipe that nobody writes to.
    """
    # Without O_NONBLOCK, a pipe would wait for its writer here.
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
    """Where the user's caches are; nothing says that it is there, or can be written.

    XDG_CACHE_HOME, else ~/.cache.  A user without a home, as in a container, has "/" for one.
    """
    home = os.path.expanduser("~")
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join("/" if home == "~" else home, ".cache"))


def _read_pipe(fd: int, limit: int) -> bytes:
    """What is written to a pipe, such as the shell's ``<(…)``."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    content, patience = b"", WRITER_WITHIN
    while len(content) < limit:
        ready = poll.poll(1000 * patience)
        try:
            data = os.read(fd, limit - len(content))
        except BlockingIOError:  # somebody may still write
            if not ready and patience == SILENT_FOR:
                raise OSError(
                    errno.ETIMEDOUT, f"it is a pipe, and nothing came for {SILENT_FOR:g} s"
                ) from None
            data = None
        if data == b"" and not ready:
            raise OSError(errno.EPIPE, "it is a pipe that nobody writes to")
        if data == b"":
            break
        content, patience = content + (data or b""), SILENT_FOR
    return content
