"""``cpulaunch profile``: traces steps of a running job on all ranks at once, and prints a summary."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from cpulaunch.cli.jobs.selection import ONLY, ONLY_WHICH, find_job, only_job, parse_ranks, printable
from cpulaunch.cli.options import Parser
from cpulaunch.errors import HostError, UsageError
from cpulaunch.supervise.control.client import Observer
from cpulaunch.supervise.profiling.request import MAX_STEPS

EPILOG = f"""\
{ONLY_WHICH}
The job continues, and is slower while it is traced.  At most {MAX_STEPS} steps can be traced.
The trace is written into the job's directory.  To view it, open it at https://ui.perfetto.dev.

examples:
  cpulaunch profile --steps 5
  cpulaunch profile --steps 3 --ranks 0-3 -o trace.json.gz runs/20261122-214433-0f3c9a7e5b1d2c48
"""


def main(arguments: list[str]) -> int:
    parser = Parser("cpulaunch profile", "Trace steps of a running job, and print a summary.", EPILOG)
    parser.add_argument("job", metavar="JOB", nargs="?", help=ONLY)
    parser.add_argument("--steps", metavar="N", default="5", help="optimizer steps to trace (default: 5)")
    parser.add_argument("--ranks", metavar="LIST", help="ranks to trace, such as 0-3 (default: all)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="also copy the trace to this file")
    options = parser.parse_args(arguments)
    steps, ranks = _steps(options.steps), list(parse_ranks("--ranks", options.ranks) or ())
    output: Path | None = options.output
    if output and (output.is_dir() or not output.parent.is_dir()):  # tracing takes a while
        raise UsageError(f"-o {output}: is a directory, or in none that exists", hint="name another file")
    directory, contact = only_job() if options.job is None else find_job(options.job)
    if options.job is None:
        _tell(f"profile of {directory}")
    try:
        with Observer(contact) as observer:
            done = observer.profile(steps, ranks, _tell)
    except KeyboardInterrupt:
        _tell("interrupted: no trace is written, and the job continues")
        raise
    if done.error:
        raise HostError(f"no trace was written: {printable(done.error)}")
    trace = directory / os.path.basename(done.file)
    if output:
        try:
            shutil.copyfile(trace, output)
        except OSError as e:
            why = f"{e.filename} can't be {'read' if e.filename == str(trace) else 'written'}: {e.strerror}"
            raise HostError(why, hint=f"the trace is in {trace}, on the host of the job's launcher") from None
        trace = output
    print(printable(f"job {contact.job}, {done.text}\n{trace}  (open it at https://ui.perfetto.dev)"))
    return 0


def _tell(line: str) -> None:
    print(f"cpulaunch: {printable(line)}", file=sys.stderr, flush=True)


def _steps(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10 and 0 < int(text) <= MAX_STEPS:
        return int(text)
    raise UsageError(f"--steps {text[:20]}: expected a whole number from 1 to {MAX_STEPS}")
