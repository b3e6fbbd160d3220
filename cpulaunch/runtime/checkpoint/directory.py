"""Directories of checkpoints, each renamed to its final name once all of it is on disk.

``step-300.partial`` is being written, or was when its job ended; it is never read.  ``step-300`` is complete.
``step-300.old`` is being removed.  ``step-300.damaged`` was complete once, and could not be read later.  Only
rank 0 makes, renames and removes directories.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cpulaunch.errors import UsageError
from cpulaunch.runtime.checkpoint.failures import Damaged

SCHEMA = 1
FACTS = "checkpoint.json"
_COMPLETE = re.compile(r"step-(\d+)")
_REST = re.compile(r"step-\d+\.(partial|old)")


@dataclass(frozen=True)
class Facts:
    """The contents of ``checkpoint.json``.

    ``step`` counts batches that each rank has trained on, ``optimizer_steps`` the steps of all optimizers.
    ``epoch`` and ``batch`` are the position in the data: ``batch`` batches of this epoch (from 0) are used
    up.  ``precision``: bf16 or fp32; None if nobody had chosen one.
    """

    step: int
    optimizer_steps: int
    epoch: int
    batch: int
    world_size: int
    precision: str | None = None
    schema: int = SCHEMA


def complete(root: Path) -> dict[int, Path]:
    """Return the complete checkpoints in ``root`` by step, the newest last."""
    try:
        found = {
            int(match[1]): root / name for name in os.listdir(root) if (match := _COMPLETE.fullmatch(name))
        }
    except FileNotFoundError:
        return {}
    return dict(sorted(found.items()))


def newest(root: Path) -> Path | None:
    """Return the newest complete checkpoint; None if there is none, or ``root`` can't be read."""
    with suppress(OSError):
        return next(reversed(complete(root).values()), None)
    return None


def read_facts(path: Path) -> Facts:
    """Return the facts of the checkpoint in ``path``.

    Raises Damaged if they can't be read, and UsageError if another version wrote them.
    """
    try:
        said = json.loads((path / FACTS).read_text())
        schema = said["schema"]
        facts = Facts(**said) if schema == SCHEMA else None
    except FileNotFoundError:
        raise Damaged(f"{FACTS} is missing") from None
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise Damaged(f"{FACTS} can't be read: {e}") from None
    if facts is None:
        raise UsageError(
            f"{path} was written by another version of cpulaunch (schema {schema}, not {SCHEMA})",
            hint=f"remove {path}, and the job goes on from the checkpoint before it",
        )
    return facts


def unseen(root: Path) -> UsageError:
    """Return the error for a ``root`` that only some ranks see."""
    return UsageError(
        f"some ranks don't see {root} as rank 0 does",
        hint="give Checkpoint a directory of a file system that all hosts share",
    )


def none_readable(root: Path, damaged: dict[int, str]) -> UsageError:
    """Return the error for checkpoints none of which can be read; ``damaged`` is step → reason."""
    reasons = "; ".join(f"step-{step}: {reason}" for step, reason in damaged.items())
    return UsageError(
        f"no checkpoint in {root} can be read: {reasons}",
        hint="bring back what is missing there, or give Checkpoint another directory to start anew",
    )


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that can't be read, so that it isn't counted or tried again."""
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):
        os.rename(path, aside)
    return aside


def partial(root: Path, step: int) -> Path:
    """Return the directory in which the checkpoint of ``step`` is written."""
    return root / f"step-{step}.partial"


def publish(root: Path, facts: Facts, keep: int) -> None:
    """Give a checkpoint its name, once all its files are on disk; remove all but the last ``keep``."""
    written = partial(root, facts.step)
    with (written / FACTS).open("w") as file:
        json.dump(asdict(facts), file)
        file.flush()
        os.fsync(file.fileno())
    _sync(written)
    final = root / f"step-{facts.step}"
    if final.exists():  # left by a training that was restarted from an earlier checkpoint
        _remove(final)
    os.rename(written, final)
    _sync(root)
    others = [path for step, path in complete(root).items() if step != facts.step]
    for path in others[: max(0, len(others) - keep + 1)]:
        _remove(path)


def remove_rest(root: Path) -> None:
    """Remove directories left by jobs that ended while they wrote or removed a checkpoint."""
    with suppress(OSError):  # the next save reports what is wrong there
        for name in os.listdir(root):
            if _REST.fullmatch(name):
                shutil.rmtree(root / name, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint; rename it before its first file goes."""
    old = path.with_name(f"{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(path, old)
    shutil.rmtree(old, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Write a directory's names to disk."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
