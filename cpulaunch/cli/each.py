"""``--each FILE``: a line of further arguments for each instance."""

from __future__ import annotations

import shlex
from pathlib import Path

from cpulaunch.errors import ConfigError
from cpulaunch.user_file import SETTINGS_LIMIT, read_user_file

_EXPECTED = "it has a line of arguments per instance"


def read_each(path: Path) -> tuple[tuple[str, ...], ...]:
    """The arguments of each line, split as a shell would.  Empty lines and those that begin with # are none.

    Raises ConfigError with the place where the file can't be read, or isn't such a list.
    """
    try:
        text = read_user_file(path, SETTINGS_LIMIT).decode()
    except OSError as e:
        raise ConfigError(f"--each {path}: cannot be read: {e.strerror}", hint=_EXPECTED) from None
    except UnicodeDecodeError:
        raise ConfigError(f"--each {path}: not UTF-8 text", hint=_EXPECTED) from None
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
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
