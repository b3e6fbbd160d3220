"""The directories of checkpoints.

``step-300.partial`` is being written; it is renamed to ``step-300`` when all files are on disk.
``step-300.old`` is being removed.  ``step-300.damaged`` could not be read.  Only rank 0 renames and removes
directories.
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
_TEMPORARY = re.compile(r"step-\d+\.(partial|old)")


@dataclass(frozen=True)
class Facts:
    """The contents of ``checkpoint.json``.

    ``step``: the number of batches on which each rank has trained.  ``optimizer_steps``: the number of steps
    of all optimizers.  ``epoch`` (from 0) and ``batch``: the position in the data, after ``batch`` batches of
    the epoch.  ``precision``: bf16 or fp32, or None if it was not chosen yet.
    """

    step: int
    optimizer_steps: int
    epoch: int
    batch: int
    world_size: int
    precision: str | None = None
    schema: int = SCHEMA


def complete(root: Path) -> dict[int, Path]:
    """Return step → complete checkpoint in ``root``, the newest last."""
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
        content = json.loads((path / FACTS).read_text())
        schema = content["schema"]
        facts = Facts(**content) if schema == SCHEMA else None
    except FileNotFoundError:
        raise Damaged(f"{FACTS} is missing") from None
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise Damaged(f"{FACTS} can't be read: {e}") from None
    if facts is None:
        raise UsageError(
            f"{path} was written by another version of cpulaunch (schema {schema}, not {SCHEMA})",
            hint=f"remove {path} to resume from the checkpoint before it",
        )
    return facts


def not_shared_error(root: Path) -> UsageError:
    """Return the error for a ``root`` that is not the same directory on all ranks."""
    return UsageError(
        f"some ranks don't see {root} as rank 0 does",
        hint="pass a directory in a file system that all hosts share",
    )


def all_damaged_error(root: Path, damaged: dict[int, str]) -> UsageError:
    """Return the error if no checkpoint can be read; ``damaged`` is step → reason."""
    reasons = "; ".join(f"step-{step}: {reason}" for step, reason in damaged.items())
    return UsageError(
        f"no checkpoint in {root} can be read: {reasons}",
        hint="restore the missing files, or use another directory to start from the beginning",
    )


def rename_damaged(path: Path) -> Path:
    """Rename a checkpoint that can't be read, so that it isn't tried again; return its new path."""
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):
        os.rename(path, aside)
    return aside


def partial(root: Path, step: int) -> Path:
    """Return the directory in which the checkpoint of ``step`` is written."""
    return root / f"step-{step}.partial"


def publish(root: Path, facts: Facts, keep: int) -> None:
    """Complete a checkpoint whose files are on disk; remove all but the last ``keep`` checkpoints."""
    written = partial(root, facts.step)
    with (written / FACTS).open("w") as file:
        json.dump(asdict(facts), file)
        file.flush()
        os.fsync(file.fileno())
    _sync(written)
    final = root / f"step-{facts.step}"
    if final.exists():  # the training has resumed from an earlier checkpoint
        _remove(final)
    os.rename(written, final)
    _sync(root)
    others = [path for step, path in complete(root).items() if step != facts.step]
    for path in others[: max(0, len(others) - keep + 1)]:
        _remove(path)


def remove_temporary(root: Path) -> None:
    """Remove the incomplete directories of jobs that ended while they wrote or removed a checkpoint."""
    with suppress(OSError):  # saving reports the same error
        for name in os.listdir(root):
            if _TEMPORARY.fullmatch(name):
                shutil.rmtree(root / name, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint, after renaming it so that it no longer counts as complete."""
    old = path.with_name(f"{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(path, old)
    shutil.rmtree(old, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Write a directory's entries to disk."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
