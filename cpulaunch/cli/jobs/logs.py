"""``cpulaunch logs``: shows the output of a job's ranks, and follows it on request."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cpulaunch.cli.jobs.selection import NEWEST, WHICH, find_directory, parse_ranks
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser
from cpulaunch.errors import UsageError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.names import Names
from cpulaunch.supervise.control.registry import Contact, is_gone, read_contact
from cpulaunch.supervise.output.merge import MergedLogs, Piece, Renderer
from cpulaunch.supervise.output.record import State, names_of, ranks_of, state_of

EPILOG = f"""\
{WHICH}
The lines of several ranks are shown in the order in which they were printed, with the rank before each line.
The output of a single rank is shown without changes.

examples:
  cpulaunch logs
  cpulaunch logs -f --rank 0
  cpulaunch logs --rank 0,4-7 runs/20261122-214433-0f3c9a7e5b1d2c48
"""

PERIOD = 0.2
"""Seconds between reads of a running job's logs."""

SILENCE = 10.0
"""Seconds without a sign of a launcher after which the job counts as ended."""


def main(arguments: list[str]) -> int:
    parser = Parser("cpulaunch logs", "Show the output of a job's ranks.", EPILOG)
    parser.add_argument("job", metavar="JOB", nargs="?", help=NEWEST)
    parser.add_argument(
        "--rank", "--instance", metavar="LIST", help="show only these ranks or instances, such as 3 or 0,4-7"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="follow the output until the job ends")
    options = parser.parse_args(arguments)
    ranks = parse_ranks("--rank", options.rank)
    directory = find_directory(options.job)
    if options.job is None:
        print(f"cpulaunch: logs of {directory}", file=sys.stderr, flush=True)
    _check_ranks(ranks, directory)
    raw = ranks is not None and len(ranks) == 1
    renderer, silent = Renderer(), True
    with MergedLogs(directory, lambda rank: ranks is None or rank in ranks) as logs:
        for piece in _pieces(logs, directory, options.follow):
            silent = silent and piece is None
            if piece is None:
                _show(b"".join(text for _, text in renderer.flush()))
                sys.stdout.flush()
            elif raw:
                _show(piece.data)
            else:
                _show(b"".join(text for _, text in renderer.feed(piece)))
        _show(b"".join(text for _, text in renderer.finish()))
    sys.stdout.flush()
    if silent:
        say("the ranks have printed nothing")
    return 0


def _pieces(logs: MergedLogs, directory: Path, follow: bool) -> Iterator[Piece | None]:
    """Yield the ranks' output, with ``follow`` until the job ends.  None stands for a pause in the output."""
    runs = LivenessCheck(directory)
    while follow and runs():
        yield from logs.more()
        yield None
        time.sleep(PERIOD)
    yield from logs.more()
    yield from logs.rest()


class LivenessCheck:
    """Returns whether a job is still running, also between two attempts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._contact: Contact | None = None
        self._silent_since: float | None = None

    def __call__(self) -> bool:
        self._contact = read_contact(self._directory) or self._contact
        state = state_of(self._directory)
        if state is not State.SILENT:
            self._silent_since = None
            return state is State.RUNNING
        if self._contact:
            return not is_gone(self._contact)
        self._silent_since = self._silent_since or time.monotonic()
        return time.monotonic() < self._silent_since + SILENCE


def _check_ranks(wanted: CoreSet | None, directory: Path) -> None:
    names = names_of(directory)
    existing = CoreSet(map(names.number, ranks_of(directory)))
    missing = CoreSet(set(wanted or ()) - set(existing))
    if missing and existing:
        several = Names(names.noun).several
        raise UsageError(
            f"the job in {directory} has no {several(missing)}", hint=f"it has {several(existing)}"
        )


def _show(data: bytes) -> None:
    sys.stdout.buffer.write(data)
