"""Write the ranks' output to the job's directory, and show it line by line on the screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.names import RANKS, Names
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.output.folding import (
    MAX_FOLDED,
    MOMENT,
    Fold,
    MetricFilter,
    ShownLines,
    add_prefix,
    take_folded,
)
from cpulaunch.supervise.output.logs import Logs
from cpulaunch.supervise.output.terminal import Screen
from cpulaunch.supervise.telemetry.rows import Sink

if TYPE_CHECKING:
    from cpulaunch.config.settings import AllOrNone

KEPT = 1 << 11
"""Bytes of each rank's last output that are kept for the failure report, in case the log lacks them."""

LAUNCHER_LOG = "launcher.log"

SEPARATOR = b"\n==== cpulaunch: restart "
"""First bytes of the line that separates two attempts in a log."""

ORDER = "output.order"
"""Name of the file that records the order of the ranks' output.

Each line has the time in seconds, rank, stream and number of bytes of one piece of output.  A separator of
attempts in a log has stream 0.
"""


def shown_ranks(
    tee: CoreSet | AllOrNone, world_size: int, *, strict: bool = True, names: Names = RANKS
) -> frozenset[int]:
    """Return the ranks selected by ``tee``, a value of the setting ``output.tee``.

    If ``tee`` has ranks that the job lacks, raises ConfigError, or ignores them if ``strict`` is False.
    """
    everybody = frozenset(range(world_size))
    if not isinstance(tee, CoreSet):
        return everybody if tee == "all" else frozenset()
    ranks = frozenset(number - names.first for number in tee)
    if strict and not ranks <= everybody:
        hint = f"leave it out to see the output of all {names.noun}s"
        raise ConfigError(f"--tee {tee}: {names.all_of(world_size)}", hint=hint, part=str(tee))
    return ranks & everybody


class Console(NamedTuple):
    """Destinations of a job's output and reports.

    ``directory`` is the job's directory, and ``output`` takes the ranks' output.  ``tell`` is called with
    lines for the user; with ``verbose``, also for each event.  ``telemetry`` are the sinks for telemetry.
    """

    directory: JobDirectory
    output: Output
    tell: Callable[[str], None]
    verbose: bool = False
    telemetry: Sequence[Sink] = ()


class Output:
    """Logs and shows the ranks' output, which arrives in pieces.  Never blocks.

    Each rank's log has its bytes unchanged.  If a single rank is shown, its bytes are also shown unchanged.
    Lines of several ranks get the prefix ``[rank] `` and never mix.  With ``fold``, equal lines that many
    ranks print within ``MOMENT`` seconds are shown once.  If a line is redrawn, only its last state is shown.
    ``logs`` writes the files of the job's directory.
    """

    reader: int | None = None
    """The rank that reads the terminal.  Its unfinished lines are shown, too, as they may be prompts."""

    def __init__(
        self,
        directory: JobDirectory,
        shown: frozenset[int],
        screen: Screen,
        warn: Callable[[str], None],
        *,
        fold: bool = False,
        names: Names = RANKS,
    ) -> None:
        self.screen, self._names = screen, names
        self._shown, self.logs = shown, Logs(directory, warn)
        self._lines = ShownLines()
        self._without: dict[int, MetricFilter] | None = None
        self._hidden: set[tuple[int, int]] = set()
        self._last: dict[int, bytes] = {}
        self._restart, self._began = 0, time.monotonic()
        self._separated: set[str] = set()  # logs that have this restart's separator
        self._fold = Fold() if fold else None

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Take output of a rank.  ``stream``: 1 is stdout, 2 is stderr."""
        if separator := self._separator(self._names.log(rank)):
            self._log(rank, 0, separator)
        self._log(rank, stream, data)
        self._last[rank] = data[-KEPT:] if len(data) >= KEPT else (self._last.get(rank, b"") + data)[-KEPT:]
        if rank not in self._shown or (rank, stream) in self._hidden:
            return
        if stream == 1 and self._without is not None:
            data = self._without.setdefault(rank, MetricFilter()).feed(data)
        if data:
            self._put(rank, stream, data)

    def _put(self, rank: int, stream: int, data: bytes) -> None:
        if len(self._shown) == 1:
            self.screen.put(stream, data)
            return
        lines = self._lines.feed(rank, stream, data, time.monotonic())
        self._show(rank, stream, lines)
        if rank == self.reader and (rest := self._lines.rest(rank, stream)):
            asyncio.get_running_loop().call_later(MOMENT, self._prompt, rank, stream, rest)

    def fold_pairs(self, stream: int) -> None:
        """From now on, fold equal lines even of two ranks on this stream, because it is a terminal."""
        if self._fold:
            self._fold.min_ranks[stream] = 2

    def _prompt(self, rank: int, stream: int, text: bytes) -> None:
        """Show ``text``, if the rank has printed nothing after it."""
        if self._lines.rest(rank, stream) == text:
            self._lines.forget(rank, stream)
            self.flush()
            self.screen.put(stream, b"[%d] %s" % (rank, text))

    def hide_metrics(self) -> None:
        """From now on, don't show metric lines; the logs have them."""
        self._without = {}

    def restart(self, number: int, shown: frozenset[int]) -> None:
        """Begin restart ``number``, and show the output of the ranks in ``shown``."""
        self._restart, self._shown = number, shown
        self._separated, self._last = set(), {}

    def log_launcher(self, data: bytes) -> None:
        """Log output of the launcher's own processes, which may contain environment variables."""
        self.logs.append(LAUNCHER_LOG, self._separator(LAUNCHER_LOG) + data, private=True)

    def hide(self, rank: int, stream: int) -> None:
        """Stop showing this stream of the rank; its log continues."""
        self._hidden.add((rank, stream))
        self._lines.forget(rank, stream)
        if stream == 1 and self._without:
            self._without.pop(rank, None)

    def finish(self, rank: int) -> None:
        """Handle the end of a rank: show its unfinished lines, and close its log until it is restarted."""
        if self._without and (held := self._without.pop(rank, MetricFilter()).finish()):
            self._put(rank, 1, held)
        for stream in (1, 2):
            self._show(rank, stream, self._lines.finish(rank, stream))
            self._hidden.discard((rank, stream))
        self.logs.finish(self._names.log(rank))

    def last_output(self, rank: int) -> bytes:
        """Return the last ``KEPT`` bytes that the rank has printed in this attempt."""
        return self._last.get(rank, b"")

    @property
    def full(self) -> bool:
        """Whether ranks have to wait for the terminal or the disk."""
        return self.screen.full or self.logs.full

    async def room(self) -> None:
        await self.screen.room()
        while self.logs.full:
            await asyncio.sleep(MOMENT)

    def hurry(self) -> None:
        """From now on, drop output instead of waiting for the terminal or the disk."""
        self.screen.hurry()
        self.logs.hurry()

    def flush(self) -> None:
        """Show the lines that wait to be folded."""
        if self._fold:
            for stream, text in take_folded(self._fold):
                self.screen.put(stream, text)

    def _separator(self, log: str) -> bytes:
        """Return the separator to write to ``log`` before the first output after a restart, else nothing."""
        if not self._restart or log in self._separated:
            return b""
        self._separated.add(log)
        return SEPARATOR + b"%d ====\n" % self._restart

    def _log(self, rank: int, stream: int, data: bytes) -> None:
        """Append to the rank's log, and record the piece in ``output.order``."""
        if self.logs.append(self._names.log(rank), data):
            seconds, number = time.monotonic() - self._began, self._names.number(rank)
            self.logs.append(ORDER, b"%.3f %d %d %d\n" % (seconds, number, stream, len(data)))

    def _show(self, rank: int, stream: int, lines: list[bytes]) -> None:
        if not self._fold:
            self.screen.put(stream, add_prefix(rank, lines))
            return
        if lines and not self._fold.size:
            asyncio.get_running_loop().call_later(MOMENT, self.flush)
        for line in lines:
            self._fold.add(rank, (stream, line))
        if self._fold.size > MAX_FOLDED:
            self.flush()
