"""What the program's bootstrap reports to the agent."""

from __future__ import annotations

from collections.abc import Iterator

from cpulaunch.messages import FROM_RANK, Report, Unknown
from cpulaunch.wire import Lines, MessageError, decode


class Reports:
    """Reads the reports of one program.  Any child of it may write there, so nothing is relied on."""

    def __init__(self) -> None:
        self._lines = Lines()

    def feed(self, data: bytes) -> Iterator[Report | Unknown]:
        """The reports that ``data`` completes, up to the first that is none."""
        try:
            for line in self._lines.feed(data):
                yield decode(line, FROM_RANK)
        except MessageError:
            self._lines = Lines()
