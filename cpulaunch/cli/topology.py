"""``cpulaunch topology``: draws a machine's cores as text, with the ranks or instances on them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cpulaunch.cli import terminal
from cpulaunch.cli.options import Parser, add_settings, load_config
from cpulaunch.cli.run.each import add_each, instances_of
from cpulaunch.cli.run.facts import gather
from cpulaunch.cli.run.preview import picture_of_first_host
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Program

EPILOG = """\
examples:
  cpulaunch topology -ppn 2
  cpulaunch topology --cores-per-instance 4
  lscpu -p=CPU,CORE,SOCKET,NODE,MAXMHZ > node1.txt; cpulaunch topology -ppn 4 --lscpu node1.txt
"""


def main(arguments: list[str]) -> int:
    what = "Draw this machine's cores, and the ranks on them."
    parser = Parser("cpulaunch topology", what, EPILOG, "cpulaunch topology [OPTIONS]")
    parser.add_argument(
        "--lscpu", metavar="F", type=Path, help="draw the machine described by this output of lscpu"
    )
    parser.add_argument("--facts", metavar="F", type=Path, help="draw the first host in this facts file")
    add_each(parser)
    add_settings(
        parser, ("hosts", "instances", "ccl", "cpu", "training"), common=("hosts", "instances", "cpu")
    )
    options = parser.parse(arguments)
    config, each = instances_of(load_config(options), options.each)
    facts = gather(config, facts_file=options.facts, lscpu_file=options.lscpu)
    program = Program((sys.executable,), False, os.getcwd(), sys.executable, each)
    made = make_plan(config, facts, program)
    width = terminal.width()
    print(
        picture_of_first_host(
            made,
            facts,
            width=width,
            colour=sys.stdout.isatty() and terminal.has_colour(),
            unicode=terminal.has_unicode(),
        )
    )
    for note in made.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0
