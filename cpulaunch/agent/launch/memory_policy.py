"""The memory policy of this process, which its children inherit; imported only where there is one to set."""

from __future__ import annotations

import ctypes
import os

from cpulaunch.model.cores import CoreSet

_MODES = {"prefer": 1, "bind": 2}  # MPOL_PREFERRED, MPOL_BIND of linux/mempolicy.h

# glibc has no function for it.  Numbers of the system calls by machine, of Linux's own tables.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}


def set_memory_policy(policy: str) -> None:
    """Take memory as ``policy`` says: ``prefer:1``, or ``bind:0-1``.  Raises OSError.

    Source: set_mempolicy(2).
    """
    mode, _, nodes = policy.partition(":")
    mask = sum(1 << node for node in CoreSet.parse(nodes))
    words = mask.bit_length() // 64 + 1
    numbers = (ctypes.c_uint64 * words)(*((mask >> (64 * i)) & (1 << 64) - 1 for i in range(words)))
    machine = os.uname().machine
    if machine not in _SET_MEMPOLICY:
        raise OSError(f"how to set it isn't known for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    if libc.syscall(_SET_MEMPOLICY[machine], _MODES[mode], numbers, 64 * words + 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
