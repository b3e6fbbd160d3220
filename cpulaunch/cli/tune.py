"""``cpulaunch tune``: runs the user's script briefly with different settings; writes the fastest settings."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from math import ceil
from pathlib import Path

from cpulaunch.cli.files import write_and_report
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser, add_settings, load_config, without_options
from cpulaunch.cli.run.command import MODULE, program_of
from cpulaunch.config.config import Config
from cpulaunch.config.kinds import Every
from cpulaunch.config.values import Interval
from cpulaunch.errors import UsageError
from cpulaunch.plan.instances import are_wanted
from cpulaunch.plan.plan import Program
from cpulaunch.plugins import ENGINE_PACKAGES
from cpulaunch.tune import table
from cpulaunch.tune.search import COARSE, CONFIRMATIONS, Found, Trial, confirm, search
from cpulaunch.tune.space import Space, Values
from cpulaunch.tune.trial import Goal, Runner

USAGE = """cpulaunch tune [OPTIONS] train.py [ARGS…]
       cpulaunch tune [OPTIONS] -m module [ARGS…]"""
EPILOG = """\
Every trial uses the options of `cpulaunch run` that you set; tune varies other settings.

examples:
  cpulaunch tune train.py
  cpulaunch tune --budget 30m -f hostfile -o four-nodes.yaml train.py --lr 0.1

exit code: 0; 1 no trial made steps; 2 wrong usage or settings; 3 a host is
not ready; 130 interrupted
"""

OWN = ("--budget", "--output", "-o", "--force", "--format", "--wdir")
"""Options that are not passed to `cpulaunch run`."""

FIRST_SHARE = 0.5
"""Fraction of the budget in which the first trial must have a rate."""

SHARE = 0.05
"""Maximum duration of a trial, as a fraction of the budget; at least the first trial's duration."""

SLOWER = 3.0
"""Time limit of a trial without a rate, as a multiple of its maximum duration."""

RESERVED = 2.4 * CONFIRMATIONS
"""Time reserved for the confirmations, as a multiple of the first trial's: 1.2 times what they need."""

ENOUGH = 20
"""A budget for about a dozen trials and the confirmations, as a multiple of the first trial's duration."""


def main(arguments: list[str]) -> int:
    parser = _parser()
    words, rest = parser.split(arguments, ends=MODULE)
    options = parser.parse_args(words)
    if options.output.exists() and not options.force:
        raise UsageError(
            f"{options.output} exists already", hint="-o names another file; --force replaces it"
        )
    config = load_config(options)
    if are_wanted(config):
        raise UsageError("tune needs ranks: instances can't be tuned", hint="leave out --instances")
    program = program_of(rest, False, options.wdir)
    if options.wdir == Path():
        say("warning: the script runs many times, and may overwrite its checkpoints and logs: "
            "--wdir names another directory to run in")  # fmt: skip
    tuning = Tuning(_space(config, program), _runner(words, rest, options.wdir), options.budget)
    return _report(tuning, options, config)


def _report(tuning: Tuning, options: argparse.Namespace, config: Config) -> int:
    """Tune, and show the trials, even after an interruption."""
    found, code = None, 0
    try:
        found = tuning.find()
    except (KeyboardInterrupt, SystemExit) as e:
        say("interrupted after these trials")
        code = 130 if isinstance(e, KeyboardInterrupt) else int(e.code or 0)
    if options.format == "json":
        print(json.dumps(table.as_json(tuning.trials, found), indent=1))
    else:
        print("\n".join(table.text(tuning.trials)))
    if found is None:
        return code or 1
    if not found.is_faster:
        say(_why_nothing(found, tuning))
        return 0
    write_and_report(options.output, table.as_yaml(tuning.trials, found.winner.values, config))
    each = ", ".join(f"{ratio:.2f}" for ratio in found.ratios)
    faster = (
        f"{found.ratio:.2f} times as fast as the default (comparisons: {each})"
        if each
        else "works, while the default settings fail"
    )
    say(f"{table.title(found.winner.values)}: {faster}")
    say(f"{options.output} is written; `cpulaunch run` " + _how_used(options.output))
    return 0


def _why_nothing(found: Found, tuning: Tuning) -> str:
    if len(tuning.trials) == 1:
        seconds = tuning.trials[0].seconds
        return (
            f"no time was left for other trials, because one takes {seconds:.0f} s; "
            f"try --budget {ceil(ENOUGH * seconds / 60)}m"
        )
    if found.winner.values and len(found.ratios) < CONFIRMATIONS:
        return (
            f"{table.title(found.winner.values)} may be faster, but no time was left to confirm it; "
            "increase --budget"
        )
    return "no settings were faster than the default: nothing is written"


def _how_used(output: Path) -> str:
    if output.absolute() == Path("cpulaunch.yaml").absolute():
        return "in this directory uses it"
    return f"--config-file {output} uses it"


class Tuning:
    """A tuning: the settings to try, the trials so far, and the ``budget`` in seconds."""

    def __init__(self, space: Space, runner: Runner, budget: float) -> None:
        self.trials: list[Trial] = []
        self._space, self._runner, self._budget = space, runner, budget
        self._deadline = time.monotonic() + budget
        self._reserve = 0.0  # seconds reserved for confirmations
        self._shortest, self._longest = 0.0, SHARE * budget  # duration of a trial

    def find(self) -> Found | None:
        """Return the fastest settings; None if no trial made steps."""
        default = self._run({}, Goal(COARSE, 0.0, self._longest, FIRST_SHARE * self._budget))
        if default.rate and default.rate.unit == "steps":
            say("warning: the batch size is unknown, so tune compares steps instead of samples: "
                "the batch per rank must not depend on the settings")  # fmt: skip
        self._reserve = RESERVED * default.seconds
        self._shortest, self._longest = default.seconds, max(self._longest, default.seconds)
        winner = search(default, self._space.stages, self._measure)
        if winner.rate is None:
            return None
        self._reserve = self._shortest = 0.0
        self._longest = self._left() / RESERVED
        return confirm(winner, default, self._measure)

    def _left(self) -> float:
        return self._deadline - time.monotonic() - self._reserve

    def _measure(self, values: Values, tolerance: float, to_beat: float = 0.0) -> Trial | None:
        left = self._left()
        if left <= self._shortest:
            return None
        enough = min(left, self._longest)
        return self._run(values, Goal(tolerance, to_beat, enough, min(left, SLOWER * enough)))

    def _run(self, values: Values, goal: Goal) -> Trial:
        ranks = self._space.plan(values).world_size
        trial = self._runner.run(values, ranks, goal)
        self.trials.append(trial)
        result = f"{trial.rate.per_second:,.1f} {trial.rate.unit}/s" if trial.rate else f"failed: {trial.why}"
        say(f"trial {len(self.trials)}: {table.title(values)}: {result}")
        return trial


def _parser() -> Parser:
    parser = Parser("cpulaunch tune", "Find the fastest settings for a script, by short runs.", EPILOG, USAGE)
    own = parser.add_argument_group("Tuning")
    own.add_argument("--budget", metavar="TIME", type=_seconds, default="10m",
                     help="time limit, such as 10m or 2h; default: 10m")  # fmt: skip
    own.add_argument("-o", "--output", metavar="F", type=Path, default=Path("cpulaunch.yaml"),
                     help="YAML file to write; default: cpulaunch.yaml")  # fmt: skip
    own.add_argument("--force", action="store_true", help="replace the file if it exists")
    own.add_argument("--format", choices=("text", "json"), default="text", help="format of the result")
    own.add_argument(
        "--wdir", metavar="DIR", type=Path, default=Path(), help="working directory of the ranks"
    )
    add_settings(parser)
    return parser


def _seconds(text: str) -> float:
    with suppress(ValueError):
        interval = Every().from_text(text)
        if isinstance(interval, Interval) and interval.seconds:
            return interval.seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 10m or 2h")


def _space(config: Config, program: Program) -> Space:
    """Collect the facts of the hosts and measure precisions, as a run does; return the settings to try."""
    from cpulaunch.ccl.installed import state
    from cpulaunch.cli.run.facts import gather, measured_plan

    _, facts = measured_plan(config, gather(config, program=program), program)

    def installed(engine: str) -> bool:
        package = ENGINE_PACKAGES.get(engine)
        return package is None or find_spec(package) is not None

    return Space(config, facts, program, installed, state().oneccl_problem is None)


def _runner(words: Sequence[str], rest: Sequence[str], wdir: Path) -> Runner:
    return Runner([*without_options(OWN, words), f"--wdir={wdir.absolute()}"], rest, dict(os.environ))
