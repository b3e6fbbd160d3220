"""Reading a file that the user has named, whatever that is: never more of it than such a file can be."""

from __future__ import annotations

import errno
from pathlib import Path

SETTINGS_LIMIT = 1 << 20
"""Bytes of a file of settings."""

HOSTFILE_LIMIT = 16 << 20
"""Bytes of a hostfile: 100,000 hosts with comments take less."""

FACTS_LIMIT = 256 << 20
"""Bytes of a facts file: 1,024 hosts that all differ take a quarter of it."""


def read_user_file(path: Path, limit: int) -> bytes:
    """The content of ``path``, of ``limit`` bytes at most.  OSError where it can't be read, or is larger."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit >> 20} MiB")
    return content
