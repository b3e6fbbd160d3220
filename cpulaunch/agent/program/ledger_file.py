"""The memory file of a rank's ledger (`cpulaunch.ledger`), which the agent makes and the program maps."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Any

from cpulaunch import ledger, variables

_NAME = "cpulaunch-ledger"


def offer(env: dict[str, str]) -> tuple[int, mmap.mmap] | tuple[None, None]:
    """Make a ledger for the program with the variables ``env``, which pass its descriptor on.

    Returns the descriptor, to be closed once the program has inherited it, and the agent's mapping.  Both are
    None if the kernel refuses it.
    """
    try:
        fd = os.memfd_create(_NAME)
    except OSError:
        return None, None
    try:
        os.truncate(fd, ledger.SIZE)
        kept = mmap.mmap(fd, ledger.SIZE)
    except OSError:
        os.close(fd)
        return None, None
    os.set_inheritable(fd, True)
    env[variables.LEDGER_FD] = str(fd)
    return fd, kept


def groups(kept: mmap.mmap | bytes | None, *, unfinished: bool = False) -> list[dict[str, Any]]:
    """The groups of a ledger in the form of ``Dump``: times are in seconds, or None for events still to come.

    With ``unfinished``, leave out groups of ``ccl`` whose operations have all completed.  Other backends
    don't record which operations have failed.
    """
    found = ledger.groups(kept) if kept else []
    return _documents(group for group in found if not unfinished or _is_unfinished(group))


def last_calls(kept: mmap.mmap | bytes | None) -> list[dict[str, Any]]:
    """The last collective of each group of ``ccl`` of an ended program, if it has completed.

    This includes groups that the program has destroyed.  Other backends are left out, as their records may be
    a second old.
    """
    found = [*ledger.groups(kept), *ledger.groups(kept, closed=True)] if kept else []
    called = [
        group._replace(operations=tuple(collectives[-1:]))
        for group in found
        if group.backend == "ccl" and (collectives := [op for op in group.operations if not op.is_message])
    ]
    # Several groups may have had the same name; the newest counts.
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
    """In the program: map the ledger behind ``fd``, and close ``fd``.

    Does nothing if ``fd`` is no ledger, as a program may have closed it and opened another file.
    """
    try:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}"):
            ledger.of_this_process = mmap.mmap(fd, ledger.SIZE)
            os.close(fd)
            os.register_at_fork(after_in_child=_forget)
    except OSError:
        pass


def _forget() -> None:
    """Forget the ledger in a forked process, which is not the rank."""
    ledger.of_this_process = None
