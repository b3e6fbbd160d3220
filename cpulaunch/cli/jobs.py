"""``cpulaunch jobs``: the user's running jobs, and how far they are."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from cpulaunch.cli.options import Parser
from cpulaunch.cli.running import Running, printable, running_jobs
from cpulaunch.errors import HostError
from cpulaunch.supervise.observer import Observer
from cpulaunch.supervise.observer_messages import Status
from cpulaunch.supervise.registry import forget, is_gone
from cpulaunch.supervise.status import duration
from cpulaunch.wording import counted

EPILOG = """\
Jobs started on this host are found automatically; name others by their directory, or one that holds them.

examples:
  cpulaunch jobs
  cpulaunch jobs /shared/runs
"""


def main(arguments: list[str]) -> int:
    parser = Parser("cpulaunch jobs", "Your running jobs and their progress.", EPILOG)
    parser.add_argument(
        "directories", metavar="DIR", nargs="*", type=Path, help="a job's directory, or a directory of jobs"
    )
    options = parser.parse_args(arguments)
    jobs = running_jobs(options.directories)
    for running in jobs:
        print(printable("\n".join(_lines(running))))
    if not jobs:
        print("no job of yours is running here")
    return 0


def _lines(running: Running) -> Iterator[str]:
    directory, contact = running
    if is_gone(contact):
        forget(directory)
        yield f"{contact.job}  has ended without a word: its launcher, process {contact.pid}, is gone"
        yield f"    {directory}"
        return
    try:
        with Observer(contact) as observer:
            yield f"{contact.job}  {_words(observer.status())}"
    except HostError as e:
        yield f"{contact.job}  does not answer: {e.hint}"
    yield f"    {directory}"
    yield f"    {shlex.join(contact.command)}"


def _words(status: Status) -> str:
    parts = [status.state, f"{counted(status.hosts, 'host')}, {counted(status.ranks, 'rank')}"]
    if status.running < status.ranks:
        parts[1] += f" ({status.running} up)"
    parts.append(duration(status.seconds))
    for number, noun, rate in (
        (status.steps, "step", status.step_rate),
        (status.collectives, "collective", status.collective_rate),
    ):
        if number:
            parts.append(counted(number, noun) + (f" ({rate:.3g}/s)" if rate else ""))
    return " · ".join(parts)
