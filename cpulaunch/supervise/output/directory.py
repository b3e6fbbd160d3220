"""A job's directory, held open by a descriptor, so that a replaced path cannot redirect its files."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_NOBODY = 65534
"""UID of ``nobody``, the usual owner of files that root creates on NFS (exports(5), root_squash)."""

TEMPORARY = "cpulaunch-"
"""Prefix of the names of temporary directories.  Each contains a job's directory."""


def temporary_places() -> Iterator[Path]:
    """Yield the parent directories to try for a job's temporary directory."""
    memory = Path("/dev/shm")
    with contextlib.suppress(OSError):
        if (usual := Path(tempfile.gettempdir())) != memory:
            yield usual
    yield memory


class JobDirectory:
    """A directory that is addressed by its descriptor rather than its path.

    Users who may write to a parent directory can move this directory and put a link or another directory at
    its path.  The files that are opened here are still in the original directory.
    """

    def __init__(self, path: Path) -> None:
        """Open the directory at ``path``.  Raises OSError if it does not exist or is a link."""
        self.path = path.absolute()
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    @classmethod
    def make(cls, path: Path) -> JobDirectory:
        """Create the directory and its missing parents.

        Raises OSError if that fails, or if somebody has put another directory at ``path`` in the meantime.
        """
        path.mkdir(parents=True)
        made = cls(path)
        if os.fstat(made.fd).st_uid not in (os.geteuid(), _NOBODY) or os.listdir(made.fd):
            os.close(made.fd)
            raise OSError(errno.EEXIST, "somebody has put another directory in its place")
        return made

    @classmethod
    def make_temporary(cls, parent: Path, job_id: str) -> JobDirectory:
        """Create ``parent/cpulaunch-…/job_id``, which only the user can read.  Raises OSError."""
        return cls.make(Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent), job_id))

    @property
    def place(self) -> str:
        """A path of the directory for child processes, which is valid until they call exec."""
        return f"/proc/self/fd/{self.fd}"

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open the file ``name`` and return its descriptor.  Raises OSError, for example for a link."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=self.fd)

    @contextlib.contextmanager
    def whole(self, name: str, mode: int = 0o666) -> Iterator[BinaryIO]:
        """Write a file atomically: it gets the name ``name`` once it is complete.  Raises OSError."""
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
