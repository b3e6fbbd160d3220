"""Where checkpoints lie: one directory each, which gets its name when all of it is on disk.

``step-300.partial`` is being written, or was when its job ended, and is never read.  ``step-300`` is whole.
``step-300.old`` is being removed.  ``step-300.damaged`` was whole once, and could not be read later.  Only
rank 0 makes, renames and removes them.
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
    """What ``checkpoint.json`` says.

    ``step``: batches that each rank has trained on, ``optimizer_steps`` those of all optimizers.  ``epoch``
    and ``batch`` are where the data are: this many batches of this epoch (from 0) are used up.
    ``precision``: bf16 or fp32; None where nobody had chosen one.
    """

    step: int
    optimizer_steps: int
    epoch: int
    batch: int
    world_size: int
    precision: str | None = None
    schema: int = SCHEMA


def complete(root: Path) -> dict[int, Path]:
    """The complete checkpoints in ``root`` by step, the newest last."""
    try:
        found = {
            int(match[1]): root / name for name in os.listdir(root) if (match := _COMPLETE.fullmatch(name))
        }
    except FileNotFoundError:
        return {}
    return dict(sorted(found.items()))


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint; None where there is none, or nobody can see any."""
    with suppress(OSError):
        return next(reversed(complete(root).values()), None)
    return None


def read_facts(path: Path) -> Facts:
    """The facts of the checkpoint in ``path``.

    Raises Damaged where they can't be read, and UsageError where another version wrote them.
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
    """The error where only some ranks see ``root``."""
    return UsageError(
        f"some ranks don't see {root} as rank 0 does",
        hint="give Checkpoint a directory of a file system that all hosts share",
    )


def none_readable(root: Path, damaged: dict[int, str]) -> UsageError:
    """The error where there are checkpoints, by step, each of which can't be read for a reason."""
    reasons = "; ".join(f"step-{step}: {reason}" for step, reason in damaged.items())
    return UsageError(
        f"no checkpoint in {root} can be read: {reasons}",
        hint="bring back what is missing there, or give Checkpoint another directory to start anew",
    )


def set_aside(path: Path) -> Path:
    """Take its name from a checkpoint that can't be read, so that it isn't counted or tried again."""
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):
        os.rename(path, aside)
    return aside


def partial(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is written."""
    return root / f"step-{step}.partial"


def publish(root: Path, facts: Facts, keep: int) -> None:
    """Give a checkpoint whose files are all on disk its name, and remove all but the last ``keep``."""
    written = partial(root, facts.step)
    with (written / FACTS).open("w") as file:
        json.dump(asdict(facts), file)
        file.flush()
        os.fsync(file.fileno())
    _sync(written)
    final = root / f"step-{facts.step}"
    if final.exists():  # of a training that was started anew from an earlier one
        _remove(final)
    os.rename(written, final)
    _sync(root)
    others = [path for step, path in complete(root).items() if step != facts.step]
    for path in others[: max(0, len(others) - keep + 1)]:
        _remove(path)


def remove_rest(root: Path) -> None:
    """Remove what jobs have left that ended while they wrote a checkpoint, or removed one."""
    with suppress(OSError):  # the save that follows says what is wrong there
        for name in os.listdir(root):
            if _REST.fullmatch(name):
                shutil.rmtree(root / name, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint, which has lost its name before it loses its first file."""
    old = path.with_name(f"{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(path, old)
    shutil.rmtree(old, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Have the names in a directory on disk."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
