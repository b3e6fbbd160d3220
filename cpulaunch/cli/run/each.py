"""``--each FILE``: further arguments for instances, one line for each instance."""

from __future__ import annotations

import shlex
from pathlib import Path

from cpulaunch.cli.options import Parser
from cpulaunch.config.config import Config
from cpulaunch.config.load import read_text
from cpulaunch.errors import ConfigError, UsageError
from cpulaunch.plan.instances import are_wanted, as_instances

_EXPECTED = "the file has a line of arguments for each instance"


def add_each(parser: Parser) -> None:
    """Add the option to the parser."""
    parser.add_rare(
        "--each", metavar="FILE", type=_named, help="file with further arguments, one line for each instance"
    )


def _named(text: str) -> Path:
    if not text:
        raise UsageError("--each: the file's name is empty", hint=_EXPECTED)
    return Path(text)


def instances_of(config: Config, path: Path | None) -> tuple[Config, tuple[tuple[str, ...], ...]]:
    """Return the config with the number of instances, and the arguments of each from the file ``path``.

    Raises ConfigError if the file is invalid, and UsageError if the job has no instances.
    """
    each = read_each(path) if path else ()
    config = as_instances(config, len(each))
    if each and not are_wanted(config):
        why = f"--each: the job has no instances, as {config.where(Config.instances.count)} is none"
        raise UsageError(why, hint="leave out one of the two")
    return config, each


def read_each(path: Path) -> tuple[tuple[str, ...], ...]:
    """Return the arguments in each line, split as a shell would.  Skip empty lines and comments (#).

    Raises ConfigError with the line if the file is invalid.
    """
    lines = []
    for number, line in enumerate(read_text(path, f"--each {path}", _EXPECTED).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            lines.append(tuple(shlex.split(line)))
        except ValueError as e:
            raise ConfigError(
                f"{path}:{number}: {str(e)[0].lower()}{str(e)[1:]}", hint="lines are split as a shell would"
            ) from None
        if "\0" in line:
            raise ConfigError(f"{path}:{number}: an argument can't have a null character")
    if not lines:
        raise ConfigError(f"--each {path}: has no line of arguments", hint=_EXPECTED)
    return tuple(lines)
