"""``cpulaunch logs``: the output of a job's ranks, so far or as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cpulaunch.cli.jobs.selection import NEWEST, WHICH, find_directory
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser
from cpulaunch.errors import ConfigError, UsageError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.names import Names
from cpulaunch.supervise.control.registry import Contact, is_gone, read_contact
from cpulaunch.supervise.output.merge import MergedLogs, Piece, Renderer
from cpulaunch.supervise.output.record import State, names_of, ranks_of, state_of

EPILOG = f"""\
{WHICH}
The lines of all ranks come in the order in which they were printed, and as the terminal showed them;
those of a single rank as they are in its log.

examples:
  cpulaunch logs
  cpulaunch logs -f --rank 0
  cpulaunch logs --rank 0,4-7 runs/20261122-214433-0f3c9a7e5b1d2c48
"""

PERIOD = 0.2
"""Seconds between two looks at the logs of a running job."""

UNKNOWN_FOR = 10.0
"""Seconds of silence after which a job counts as ended; it is also silent between two attempts."""


def main(arguments: list[str]) -> int:
    parser = Parser("cpulaunch logs", "Show what the ranks of a job have printed.", EPILOG)
    parser.add_argument("job", metavar="JOB", nargs="?", help=NEWEST)
    parser.add_argument(
        "--rank", "--instance", metavar="LIST", help="show these ranks or instances only, such as 3 or 0,4-7"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="follow the output until the job ends")
    options = parser.parse_args(arguments)
    ranks = _ranks(options.rank)
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
        say("nothing has been printed")
    return 0


def _pieces(logs: MergedLogs, directory: Path, follow: bool) -> Iterator[Piece | None]:
    """Yield the ranks' output until the job has ended; None if there is nothing new for a while."""
    alive = Watched(directory)
    while follow and alive():
        yield from logs.more()
        yield None
        time.sleep(PERIOD)
    yield from logs.more()
    yield from logs.rest()


class Watched:
    """Finds out whether a job goes on, even while another attempt is being prepared."""

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
        return time.monotonic() < self._silent_since + UNKNOWN_FOR


def _ranks(named: str | None) -> CoreSet | None:
    if named is None:
        return None
    try:
        return CoreSet.parse(named)
    except ConfigError as e:
        raise UsageError(f"--rank {named}: {e}", hint="a rank, or a list such as 0,4-7") from None


def _check_ranks(wanted: CoreSet | None, directory: Path) -> None:
    names = names_of(directory)
    there = CoreSet(map(names.number, ranks_of(directory)))
    missing = CoreSet(set(wanted or ()) - set(there))
    if missing and there:
        missed = Names(names.noun).several(missing)
        hint = f"its only {names.noun} is {there}" if len(there) == 1 else f"its {names.noun}s are {there}"
        raise UsageError(f"the job in {directory} has no {missed}", hint=hint)


def _show(data: bytes) -> None:
    sys.stdout.buffer.write(data)
