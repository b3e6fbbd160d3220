"""Helpers for libraries that resume from their own checkpoints in a restarted job."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

from cpulaunch import variables

FACTS = "cpulaunch.json"
"""The file that marks a checkpoint as written by this job.  Checkpoints of other jobs are not loaded."""


def may_restart() -> bool:
    """Return whether the job is restarted if it fails."""
    return os.environ.get(variables.MAX_RESTARTS, "0") != "0"


def write_facts(path: Path, **facts: Any) -> None:
    """Mark the complete checkpoint in ``path`` as written by this job.  Only one rank must call this."""
    new = path / f"{FACTS}.new"
    new.write_text(json.dumps({"job": os.environ.get(variables.JOB_ID), **facts}))
    new.rename(path / FACTS)


def read_facts(path: Path) -> Any:
    """Return the facts of a checkpoint; None if this job didn't write it."""
    facts = read_json(path / FACTS)
    return facts if facts and facts["job"] == os.environ.get(variables.JOB_ID) else None


def is_restarted() -> bool:
    """Return whether the job was restarted."""
    return os.environ.get(variables.RESTART_COUNT, "0") != "0"


def numbered_directories(root: Path, pattern: str) -> dict[int, Path]:
    """Return number → directory for the names in ``root`` that match ``pattern``, the highest last."""
    try:
        names = os.listdir(root)
    except OSError:
        return {}
    found = {int(match[1]): root / name for name in names if (match := re.fullmatch(pattern, name))}
    return {number: path for number, path in sorted(found.items()) if path.is_dir()}


def is_complete(path: Path) -> bool:
    """Return whether no file of a checkpoint is truncated, as far as the files' formats show this."""
    return all(_has_end(file) for file in path.rglob("*") if file.is_file())


def _has_end(file: Path) -> bool:
    if file.suffix == ".json":
        return read_json(file) is not None
    if file.suffix in (".pt", ".pth", ".bin"):
        return zipfile.is_zipfile(file)
    if file.suffix == ".safetensors":
        return _safetensors_has_end(file)
    return True


def _safetensors_has_end(file: Path) -> bool:
    """Return whether a file has all tensors that its header lists: 8 bytes of length, then JSON."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(length))
        except ValueError:
            return False
    last = max(
        (tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0
    )
    return bool(file.stat().st_size >= 8 + length + last)


def read_json(file: Path) -> Any:
    """Return a file's JSON; None if the file is missing or incomplete."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
