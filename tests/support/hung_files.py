"""A file system whose file never answers reads, implemented with FUSE in a separate process.

Root can mount it if /dev/fuse exists. ``python hung_files.py DIR`` mounts it, prints a line, and serves until
it is killed; then waiting processes get an error.  Source: include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LOOKUP, GETATTR, OPEN, READ, FORGET, INIT = 1, 3, 14, 15, 2, 26
HEADER = struct.Struct("=IIQQIIII")  # len, opcode, unique, node, uid, gid, pid, padding
SIZE = 1 << 20
ASYNC_READ = 1  # a reader waits for the page in state D (uninterruptible), as with a disk


def attributes(node: int) -> bytes:
    mode = 0o40755 if node == 1 else 0o100644
    return struct.pack("=6Q10I", node, SIZE, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def answer(opcode: int, node: int, body: bytes) -> bytes | int | None:
    """Return the answer to a request: an int is an error, and None means that there is no answer."""
    if opcode == INIT:
        return struct.pack("=4I2H8I", 7, 31, 1 << 16, ASYNC_READ, 16, 16, 1 << 16, 0, 0, 0, 0, 0, 0, 0)[:64]
    if opcode == LOOKUP:
        return struct.pack("=4Q2I", 2, 0, 60, 60, 0, 0) + attributes(2)
    if opcode == GETATTR:
        return struct.pack("=Q2I", 60, 0, 0) + attributes(node)
    if opcode == OPEN:
        return struct.pack("=Q2I", 1, 0, 0)
    if opcode in (READ, FORGET):
        return None
    return -38  # ENOSYS


def serve(directory: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"hung", directory.encode(), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    while True:
        request = os.read(fd, 1 << 17)
        _, opcode, unique, node, *_ = HEADER.unpack_from(request)
        said = answer(opcode, node, request[HEADER.size :])
        if said is not None:
            body, error = (b"", said) if isinstance(said, int) else (said, 0)
            os.write(fd, struct.pack("=IiQ", 16 + len(body), error, unique) + body)


@contextlib.contextmanager
def hung_file(directory: Path, inside: Callable[[list[str]], list[str]] = list) -> Iterator[Path]:
    """A file in a new ``directory`` that can be opened, and whose reads hang until the end of the block.

    ``inside`` turns a command into one that runs on another host, and then only that host has the file.
    """
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    directory.mkdir()
    command = inside([sys.executable, __file__, str(directory)])
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        if server.stdout.readline() != "mounted\n":
            pytest.skip("FUSE can't be mounted here")
        yield directory / "file"
    finally:
        server.kill()
        server.communicate(timeout=60)
        subprocess.run(inside(["umount", "-l", str(directory)]), timeout=60, check=False, capture_output=True)


if __name__ == "__main__":
    serve(sys.argv[1])
