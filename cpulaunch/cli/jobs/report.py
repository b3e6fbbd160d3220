"""``cpulaunch report``: writes a report about jobs as one HTML file, and prints a summary."""

from __future__ import annotations

import sys
from pathlib import Path

from cpulaunch import __version__
from cpulaunch.cli.files import read_existing, write_and_report
from cpulaunch.cli.jobs.selection import WHICH, find_directory, printable
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser
from cpulaunch.errors import UsageError

EPILOG = f"""\
{WHICH}
The report compares several jobs with the first one.  The file needs no network and no server.
A summary of each job is printed.
The file omits the values of `env:`, and text that looks like a token.

examples:
  cpulaunch report
  cpulaunch report 20261122-2144 20261123-0511 -o compared.html
"""

VEGA = ("vega", "vega-lite", "vega-embed")
"""JavaScript libraries that draw charts, in the order of their dependencies."""


def main(arguments: list[str]) -> int:
    parser = Parser("cpulaunch report", "Write a report about a job, as one HTML file.", EPILOG)
    parser.add_argument(
        "jobs",
        metavar="JOB",
        nargs="*",
        help="one or several jobs; default: your newest job",
    )
    parser.add_argument(
        "-o", "--output", metavar="F", type=Path, default=Path("report.html"),
        help="file to write, or - for stdout; default: report.html",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    directories = [find_directory(named) for named in options.jobs or [None]]

    # These modules import numpy.
    from cpulaunch.report.findings import in_words
    from cpulaunch.report.numbers import Numbers
    from cpulaunch.report.page import render
    from cpulaunch.report.read import read_job

    jobs = [read_job(directory) for directory in directories]
    if str(options.output) != "-":
        for job in jobs:
            print(printable(in_words(Numbers(job))), flush=True)
    text = render(jobs, _vega(), f"cpulaunch {__version__}")
    if str(options.output) == "-":
        sys.stdout.write(text)
    else:
        _write(options.output, text)
        say(f"{options.output}: {len(text.encode()) / 1e6:.1f} MB, about {', '.join(map(str, directories))}")
    return 0


def _vega() -> str:
    """Return the JavaScript of Vega.  Raises UsageError if it is not installed."""
    import cpulaunch.report

    directory = Path(cpulaunch.report.__file__).parent / "vega"
    try:
        return "\n".join((directory / f"{name}.min.js").read_text() for name in VEGA)
    except FileNotFoundError:
        hint = "in a checkout of cpulaunch, run `python scripts/wheel/backend.py`, and install it again"
        error = f"cpulaunch was installed without Vega, which draws the charts ({directory})"
        raise UsageError(error, hint=hint) from None


def _write(path: Path, text: str) -> None:
    """Write the file.  Overwrite an earlier report, but back up any other file."""
    from cpulaunch.report.page import BEGINS

    if path.is_file() and (read_existing(path) or "").startswith(BEGINS):
        path.unlink()
    write_and_report(path, text)
