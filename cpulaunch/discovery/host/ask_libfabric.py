"""Check whether a libfabric offers an endpoint that ccl can use::

    FI_PROVIDER=verbs python -I -S …/ask_libfabric.py /…/libfabric.so.1

It exits with 0 if so, else with 1 and an error on stderr.  It is a separate program because the library may
hang or crash.  It uses only the standard library.
"""

from __future__ import annotations

import ctypes
import sys

_VERSION = (1 << 16) | 10  # of libfabric's interface: 1.10
_RELIABLE_DATAGRAM = 3  # FI_EP_RDM, the type of endpoint that ccl opens
_TAGGED, _DIRECTED_RECEIVE = 1 << 3, 1 << 59  # the capabilities that it needs


class _Info(ctypes.Structure):
    """The beginning of libfabric's ``struct fi_info``."""


_Info._fields_ = [
    ("next", ctypes.POINTER(_Info)),
    ("caps", ctypes.c_uint64),
    ("mode", ctypes.c_uint64),
    ("address_format", ctypes.c_uint32),
    ("source_length", ctypes.c_size_t),
    ("destination_length", ctypes.c_size_t),
    ("source", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("handle", ctypes.c_void_p),
    ("sending", ctypes.c_void_p),
    ("receiving", ctypes.c_void_p),
    ("endpoint", ctypes.POINTER(ctypes.c_int)),  # begins with its type
]


def _ask(library: str) -> str:
    """Why ``library`` offers no endpoint that ccl can use in this environment; empty if it does."""
    fabric = ctypes.CDLL(library)
    fabric.fi_dupinfo.restype = ctypes.POINTER(_Info)
    fabric.fi_strerror.restype = ctypes.c_char_p
    hints = fabric.fi_dupinfo(None)
    hints.contents.caps = _TAGGED | _DIRECTED_RECEIVE
    hints.contents.mode = (1 << 64) - 1
    hints.contents.endpoint[0] = _RELIABLE_DATAGRAM
    found = ctypes.POINTER(_Info)()
    error = fabric.fi_getinfo(_VERSION, None, None, ctypes.c_uint64(0), hints, ctypes.byref(found))
    return f"libfabric: {fabric.fi_strerror(-error).decode()}" if error else ""


if __name__ == "__main__":
    sys.exit(_ask(sys.argv[1]) or 0)
