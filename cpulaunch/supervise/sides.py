"""Ranks whose process group says that they call different operations: what all of them call, and where.

One rank's error shows one side.  Before the others are ended, they have a moment to say theirs: by an error
of their own, or by a dump.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cpulaunch import messages
from cpulaunch.messages import AskDump, Dump
from cpulaunch.supervise.events import Send
from cpulaunch.supervise.rank import Rank, RankState
from cpulaunch.supervise.stall_report import Seen, sides

WITHIN = 2.0
"""Seconds in which the others have to say theirs."""

REQUEST = 0
"""The question's number, which is nobody else's: those of ``Dumps`` are positive, of ``Stalls`` negative."""

_DIFFER = re.compile(r"\brank \d+ (?:of the group )?calls |\bis ahead: it calls ")
"""What ccl says."""


def differ(error: str) -> bool:
    """Whether an exception says that ranks call different operations."""
    return bool(_DIFFER.search(error))


class Sides:
    """What is heard of them since the ``first`` rank has raised its error."""

    def __init__(self, ranks: Sequence[Rank], first: Rank, now: float) -> None:
        self.first, self.due = first, now + WITHIN
        self._ranks = ranks
        self._waiting = {r.rank for r in ranks if r.state is RankState.RUNNING and not r.raised}
        self._dumps: dict[int, Dump] = {}

    def ask(self) -> list[Send]:
        """The question to the others."""
        return [Send(rank, AskDump(REQUEST, native=False)) for rank in sorted(self._waiting)]

    def dumped(self, rank: Rank, dump: Dump) -> None:
        """An answer to it, or to another one."""
        if dump.request == REQUEST:
            self._dumps[rank.rank] = dump
            self._waiting.discard(rank.rank)

    def over(self, now: float) -> bool:
        """Whether all have spoken, or ended, or it takes too long."""
        said = (self._ranks[rank] for rank in self._waiting)
        return now >= self.due or all(rank.raised or rank.state is not RankState.RUNNING for rank in said)

    def note(self) -> str | None:
        """A line for each side; None where but one is known."""
        lines = sides([self._seen(rank) for rank in self._ranks])
        return "\n".join(lines) if len(lines) > 1 else None

    def _seen(self, rank: Rank) -> Seen:
        raised, dump = rank.raised, self._dumps.get(rank.rank)
        if raised is None:
            return Seen(rank.rank, rank.host, dump=dump)
        own = Dump(REQUEST, raised.at, raised.groups, [], "")
        return Seen(rank.rank, rank.host, dump=own, raised_at=_place(raised))


def _place(raised: messages.Failure) -> str:
    """``train.py:88 load_batch``."""
    if not raised.file:
        return ""
    name = raised.file.rpartition("/")[2]
    line = rf'{re.escape(name)}", line {raised.line}, in (\S+)'
    functions = re.findall(line, raised.traceback)
    return " ".join([f"{name}:{raised.line}", *functions[-1:]])
