"""A job's directory, held open, so that its files are made in this one and no other."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_NOBODY = 65534
"""Whose a directory is that root has made on NFS, mostly (exports(5), root_squash)."""


class JobDirectory:
    """A directory that stays the same one, though somebody may write to those above it.

    They can move it, and put a link or a directory of theirs in its place; what is opened here, and what is
    started in ``place``, doesn't go by its name.
    """

    def __init__(self, path: Path) -> None:
        """Hold the directory that is at ``path``.  OSError where it isn't there."""
        self.path = path.absolute()
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    @classmethod
    def make(cls, path: Path) -> JobDirectory:
        """A new one, and what is above it.

        OSError where that can't be, or somebody has already put another in its place.
        """
        path.mkdir(parents=True)
        made = cls(path)
        if os.fstat(made.fd).st_uid not in (os.geteuid(), _NOBODY) or os.listdir(made.fd):
            os.close(made.fd)
            raise OSError(errno.EEXIST, "somebody has put another directory in its place")
        return made

    @property
    def place(self) -> str:
        """Where a child process that has inherited our descriptors, and not yet called exec, finds it."""
        return f"/proc/self/fd/{self.fd}"

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open the file ``name``, which must not be a link.  OSError."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=self.fd)

    @contextlib.contextmanager
    def whole(self, name: str, mode: int = 0o666) -> Iterator[BinaryIO]:
        """A file that becomes ``name`` once all of it was written: nobody sees a part.  OSError."""
        part = f"{name}.part"
        try:
            fd = self.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(fd, "wb", 0) as file:
                yield file
            os.rename(part, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=self.fd)
            raise
