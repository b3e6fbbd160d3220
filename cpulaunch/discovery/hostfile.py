"""Reading a hostfile from disk; `model.hosts` knows its language."""

from __future__ import annotations

from pathlib import Path

from cpulaunch.errors import ConfigError
from cpulaunch.model.hosts import Host, parse_hostfile
from cpulaunch.user_file import HOSTFILE_LIMIT, read_user_file


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of the hostfile at ``path``.  ConfigError with ``file:line`` where one does not fit."""
    try:
        text = read_user_file(path, HOSTFILE_LIMIT).decode("utf-8-sig")
    except OSError as e:
        raise ConfigError(
            f"hostfile {path}: cannot be read: {e.strerror}",
            hint="one host per line: host, host:N or host slots=N",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"hostfile {path}: not UTF-8 text") from None
    return parse_hostfile(text, str(path))
