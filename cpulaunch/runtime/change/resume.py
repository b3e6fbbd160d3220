"""What libraries need to go on from their own checkpoints in a restarted job."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

from cpulaunch import variables

FACTS = "cpulaunch.json"
"""The file that makes a library's checkpoint one of this job: what an earlier job has left is none."""


def may_restart() -> bool:
    """Whether this rank's job is started again if it fails."""
    return os.environ.get(variables.MAX_RESTARTS, "0") != "0"


def write_facts(path: Path, **facts: Any) -> None:
    """Note in the checkpoint in ``path`` that this job has written it.  One rank calls it, at the end."""
    new = path / f"{FACTS}.new"
    new.write_text(json.dumps({"job": os.environ.get(variables.JOB_ID), **facts}))
    new.rename(path / FACTS)


def read_facts(path: Path) -> Any:
    """What ``write_facts`` has noted; None where this job has not."""
    facts = read_json(path / FACTS)
    return facts if facts and facts["job"] == os.environ.get(variables.JOB_ID) else None


def is_restarted() -> bool:
    """Whether this rank's job was started again after a failure."""
    return os.environ.get(variables.RESTART_COUNT, "0") != "0"


def numbered(root: Path, pattern: str) -> dict[int, Path]:
    """The directories in ``root`` whose names match a pattern with a number, by it, the highest last."""
    try:
        names = os.listdir(root)
    except OSError:
        return {}
    found = {int(match[1]): root / name for name in names if (match := re.fullmatch(pattern, name))}
    return {number: path for number, path in sorted(found.items()) if path.is_dir()}


def is_whole(path: Path) -> bool:
    """Whether each file of a checkpoint has its end; those of formats that have no end count as whole."""
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
    """A header's length in 8 bytes, the header in JSON, and the tensors where it says."""
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
    """What a file holds; None where it is not there, or not whole."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def agreed(choice: Any) -> Any:
    """Rank 0's choice, on every rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return choice
    choices = [choice]
    dist.broadcast_object_list(choices, src=0)
    return choices[0]
