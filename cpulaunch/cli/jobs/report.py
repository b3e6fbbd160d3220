"""``cpulaunch report``: a job's report as one HTML file, with a summary on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from cpulaunch import __version__
from cpulaunch.cli.files import keep, read_if_there
from cpulaunch.cli.jobs.selection import WHICH, find_directory, printable
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser
from cpulaunch.errors import UsageError

EPILOG = f"""\
{WHICH}
Several jobs are compared with the first.  The file is self-contained: it needs no network and no server.
Key figures, and what stands out, are also printed.
The file has no values of `env:`, and nothing that looks like a token.

examples:
  cpulaunch report
  cpulaunch report 20261122-2144 20261123-0511 -o compared.html
"""

VEGA = ("vega", "vega-lite", "vega-embed")
"""The scripts that draw figures, each after those that it needs.  ``scripts/wheel/backend.py`` has them."""


def main(arguments: list[str]) -> int:
    parser = Parser("cpulaunch report", "Write what a job did as one HTML file.", EPILOG)
    parser.add_argument(
        "jobs", metavar="JOB", nargs="*", help="the job, or several to compare; default: your newest one here"
    )
    parser.add_argument(
        "-o", "--output", metavar="F", type=Path, default=Path("report.html"),
        help="the file; default: report.html; - for stdout",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    directories = [find_directory(named) for named in options.jobs or [None]]

    # These need numpy, which no other command does.
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
    """Return JavaScript that defines ``vegaEmbed``.  Raises UsageError if it was not installed."""
    import cpulaunch.report

    directory = Path(cpulaunch.report.__file__).parent / "vega"
    try:
        return "\n".join((directory / f"{name}.min.js").read_text() for name in VEGA)
    except FileNotFoundError:
        hint = "in a checkout of cpulaunch, run `python scripts/wheel/backend.py`, and install it again"
        error = f"cpulaunch was installed without Vega's scripts, which draw the figures ({directory})"
        raise UsageError(error, hint=hint) from None


def _write(path: Path, text: str) -> None:
    """Write the file; an earlier report is overwritten, any other file is kept."""
    from cpulaunch.report.page import BEGINS

    if path.is_file() and (read_if_there(path) or "").startswith(BEGINS):
        path.unlink()
    keep(path, text)
