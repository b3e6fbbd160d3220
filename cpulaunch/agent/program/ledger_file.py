"""The memory file of a rank's ledger (`cpulaunch.ledger`).  The agent creates it, and the program maps it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Any

from cpulaunch import ledger, variables

_NAME = "cpulaunch-ledger"


def offer(env: dict[str, str]) -> tuple[int, mmap.mmap] | tuple[None, None]:
    """Create a ledger, and put its descriptor into the program's environment ``env``.

    Returns the descriptor and the agent's mapping, or None and None if the kernel refuses.  Close the
    descriptor after the program's start.
    """
    try:
        fd = os.memfd_create(_NAME)
    except OSError:
        return None, None
    try:
        os.truncate(fd, ledger.SIZE)
        memory = mmap.mmap(fd, ledger.SIZE)
    except OSError:
        os.close(fd)
        return None, None
    os.set_inheritable(fd, True)
    env[variables.LEDGER_FD] = str(fd)
    return fd, memory


def groups(memory: mmap.mmap | bytes | None, *, unfinished: bool = False) -> list[dict[str, Any]]:
    """The groups of a ledger in the form of ``Dump``.  Times are in seconds, or None for future events.

    With ``unfinished``, omit groups of ``ccl`` without an unfinished operation.  Groups of other backends are
    included, as their records don't show failures.
    """
    found = ledger.groups(memory) if memory else []
    return _documents(group for group in found if not unfinished or _is_unfinished(group))


def last_calls(memory: mmap.mmap | bytes | None) -> list[dict[str, Any]]:
    """The last collective of each ``ccl`` group of an ended program, if this collective has completed.

    Destroyed groups are included.  Other backends are omitted, as their records may be a second old.
    """
    found = [*ledger.groups(memory), *ledger.groups(memory, closed=True)] if memory else []
    called = [
        group._replace(operations=tuple(collectives[-1:]))
        for group in found
        if group.backend == "ccl" and (collectives := [op for op in group.operations if not op.is_message])
    ]
    # If several groups have had the same name, use the newest.
    called.sort(key=lambda group: group.operations[0].enqueued)
    last = {(group.name, group.members): group for group in called}
    return _documents(group for group in last.values() if group.operations[0].state == ledger.COMPLETED)


def _documents(found: Iterable[ledger.Group]) -> list[dict[str, Any]]:
    return [
        {**group._asdict(), "operations": [_in_seconds(each._asdict()) for each in group.operations]}
        for group in found
    ]


def _is_unfinished(group: ledger.Group) -> bool:
    return any(group.backend != "ccl" or each.state != ledger.COMPLETED for each in group.operations)


def _in_seconds(operation: dict[str, Any]) -> dict[str, Any]:
    times = ("enqueued", "started", "completed")
    return {**operation, **{name: operation[name] / 1e9 or None for name in times}}


def take_over(fd: int) -> None:
    """In the program: map the ledger ``fd``, and close ``fd``.

    Do nothing if ``fd`` isn't the ledger: the program may have closed it and opened another file.
    """
    try:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}"):
            ledger.of_this_process = mmap.mmap(fd, ledger.SIZE)
            os.close(fd)
            os.register_at_fork(after_in_child=_forget)
    except OSError:
        pass


def _forget() -> None:
    """Drop the ledger in a forked process: only the rank itself may write to it."""
    ledger.of_this_process = None
