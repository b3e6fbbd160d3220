"""``cpulaunch bench``: compares collectives of ccl with gloo and with the limits of the hosts."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpulaunch.bench.limits import OPERATIONS
from cpulaunch.bench.table import Result
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser, add_settings, load_config, without_options
from cpulaunch.config.config import Config
from cpulaunch.config.origin import Source
from cpulaunch.errors import CpulaunchError, UsageError
from cpulaunch.plan.instances import are_wanted
from cpulaunch.supervise.nested import nested_run
from cpulaunch.wording import counted, did_you_mean

USAGE = "cpulaunch bench [OPTIONS]"
EPILOG = """\
The options of `cpulaunch run` select hosts, ranks and cores.

examples:
  cpulaunch bench -n 2
  cpulaunch bench -f hostfile --operations all_reduce --sizes 4K-256M --format json

exit code: 0; the job's if its ranks failed; 2 wrong usage or settings;
3 a host is not ready; 130 interrupted
"""

OWN = ("--operations", "--sizes", "--format")
"""Options that are not passed to `cpulaunch run`."""

STEP = 4
"""Ratio of consecutive sizes in a range."""

UNITS = {"": 0, "K": 10, "M": 20, "G": 30}

PROGRAM = ["-m", "cpulaunch.bench.ranks.program"]
"""The program of the ranks."""

MESSAGES = "messages"
"""Name of the file for the launcher's messages."""

LEAST, MOST = 64, 1 << 30
"""Smallest and largest size in bytes."""


def main(arguments: list[str]) -> int:
    parser = _parser()
    words, rest = parser.split(arguments)
    options = parser.parse_args(words)
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}", hint="bench takes options only, and no program")
    config = load_config(options)
    if are_wanted(config):
        raise UsageError("bench needs ranks: instances do not communicate", hint="leave out --instances")
    if config.origin(Config.training.backend).source is Source.COMMAND_LINE:
        raise UsageError("--backend: bench always measures both ccl and gloo", hint="leave it out")
    _check_ranks(config)
    with tempfile.TemporaryDirectory(prefix="cpulaunch-bench-") as name:
        code = _run([*without_options(OWN, words)], options, Path(name))
        if code != 0:
            return code
        result = Result.of(_measurements(Path(name)))
    print(json.dumps(result.to_json(), indent=1) if options.format == "json" else "\n".join(result.text()))
    return 0


def _check_ranks(config: Config) -> None:
    """Raise UsageError if the job would have a single rank.  Does not contact hosts."""
    from cpulaunch.cli.run.command import program_of
    from cpulaunch.cli.run.facts import gather
    from cpulaunch.plan.make import make_plan

    plan = make_plan(config, gather(config, tell=lambda line: None), program_of(PROGRAM, False, Path()))
    if plan.world_size < 2:
        raise UsageError("bench needs at least two ranks", hint="-n 2 starts two on this machine")


def _parser() -> Parser:
    what = "Compare collectives of ccl and gloo on these hosts with each other, and with the hosts' limits."
    parser = Parser("cpulaunch bench", what, EPILOG, USAGE)
    own = parser.add_argument_group("Bench")
    own.add_argument("--operations", metavar="LIST", type=_operations, default=",".join(OPERATIONS),
                     help="operations to measure, separated by commas; default: all")  # fmt: skip
    own.add_argument("--sizes", metavar="LIST", type=_sizes, default="4K-64M",
                     help="bytes of the tensor, such as 4K,1M or 4K-256M; default: 4K-64M")  # fmt: skip
    own.add_argument("--format", choices=("text", "json"), default="text", help="format of the result")
    add_settings(parser, common=("", "hosts", "mpi", "ccl"))
    return parser


def _operations(text: str) -> list[str]:
    names = text.replace("-", "_").split(",")
    for name in names:
        if name not in OPERATIONS:
            meant = did_you_mean(name, OPERATIONS)
            raise argparse.ArgumentTypeError(f"unknown operation {name!r}{meant}")
    return names


def _sizes(text: str) -> list[int]:
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        size, end = _size(first), _size(last if dash else first)
        while size <= end:
            sizes.append(size)
            size *= STEP
    if not sizes:
        raise argparse.ArgumentTypeError(f"{text!r}: a range goes from the smaller to the larger size")
    return list(dict.fromkeys(sizes))


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    size = int(match[1]) << UNITS[match[2].upper()] if match else 0
    if not LEAST <= size <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size from {LEAST} to 1G, such as 4K or 64M")
    return size


def _run(words: Sequence[str], options: argparse.Namespace, directory: Path) -> int:
    """Run the ranks, with their logs in ``directory``; return the job's exit code."""
    own = ["--backend=ccl", "--tee=none", "--set=watch.max_restarts=0", f"--set=output.log_dir={directory}"]
    sizes = ",".join(map(str, options.sizes))
    program = [*PROGRAM, ",".join(options.operations), sizes]
    say(f"measuring {counted(len(options.operations), 'operation')} in {counted(len(options.sizes), 'size')}")
    # The launcher's messages are shown only if the job fails.
    with (directory / MESSAGES).open("w+b") as messages:
        with nested_run([*words, *own], program, subprocess.DEVNULL, messages) as process:
            code = process.wait()
        if code != 0:
            messages.seek(0)
            sys.stderr.write(messages.read().decode(errors="replace"))
    return code


def _measurements(directory: Path) -> dict[str, Any]:
    """Return the measurements that rank 0 has printed."""
    for log in directory.glob("*/rank-0.log"):
        for line in reversed(log.read_text().splitlines()):
            if line.startswith("{"):
                return dict(json.loads(line))
    raise CpulaunchError("the job succeeded, but rank 0 printed no result")
