"""Reads and writes files of the user."""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from cpulaunch.cli.main import say
from cpulaunch.errors import ConfigError


def write_file(path: Path, text: str) -> Path | None:
    """Write ``text`` to ``path`` atomically; return the path of the backup if the file existed."""
    target = Path(os.path.realpath(path))  # os.replace would replace a symbolic link
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        backup = _back_up(target)
        if backup:
            shutil.copymode(target, temporary)
        else:
            os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be written: {e.strerror}", hint="choose another file") from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
    return path.with_name(backup.name) if backup else None


def write_and_report(path: Path, text: str) -> None:
    """Write the file, and report the backup of an old file."""
    if backup := write_file(path, text):
        say(f"{path} existed; the old file is now {backup}")


def read_existing(path: Path) -> str | None:
    """Return the text of the file, or None if it does not exist."""
    try:
        return path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None


def diff(path: Path, old: str, new: str) -> Iterator[str]:
    """Yield the lines of a unified diff."""
    before, after = old.splitlines(), new.splitlines()
    yield from difflib.unified_diff(before, after, str(path), f"{path} (new)", lineterm="", n=1)


def backup_of(path: Path) -> Path:
    """Return the backup's path: ``.bak`` or, if that exists, ``.bak.1`` and so on."""
    names = (f"{path.name}.bak{f'.{number}' if number else ''}" for number in count())
    return next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))


def _back_up(target: Path) -> Path | None:
    if not os.path.lexists(target):  # a link that leads to itself exists, and can't be copied
        return None
    backup = backup_of(target)
    shutil.copy2(target, backup)
    return backup


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
