"""``cpulaunch stacks``: shows the stack of every thread of every rank of a running job."""

from __future__ import annotations

from cpulaunch.cli.jobs.selection import NEWEST, WHICH, find_job, printable
from cpulaunch.cli.options import Parser
from cpulaunch.supervise.control.client import Observer
from cpulaunch.supervise.output.record import names_of
from cpulaunch.supervise.stalls.stacks import report

EPILOG = f"""\
{WHICH}
The job continues.  Each rank is stopped for a few milliseconds, with --native for up to half a second.

examples:
  cpulaunch stacks
  cpulaunch stacks --native runs/20261122-214433-0f3c9a7e5b1d2c48
"""


def main(arguments: list[str]) -> int:
    parser = Parser(
        "cpulaunch stacks", "Show the stack of each thread of each rank of a running job.", EPILOG
    )
    parser.add_argument("job", metavar="JOB", nargs="?", help=NEWEST)
    parser.add_argument("--native", action="store_true", help="also show C and C++ frames")
    options = parser.parse_args(arguments)
    directory, contact = find_job(options.job)
    with Observer(contact) as observer:
        dumps = observer.stacks(native=options.native)
    number = names_of(directory).number
    dumps = [dump._replace(rank=number(dump.rank)) for dump in dumps]
    print(printable(f"job {contact.job} in {directory}\n\n" + report(dumps)), end="")
    return 0
