"""Ranks as their agents see them: ledgers and stacks, for tests of reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpulaunch.ledger import COMPLETED, STARTED
from cpulaunch.messages import Dump
from cpulaunch.supervise.stalls.report import Explanation, explain
from cpulaunch.supervise.stalls.snapshot import Snapshot

NOW = 1000.0
Frame = tuple[str, str, int]
MAIN: Frame = ("main", "/home/me/train.py", 91)
LOAD: Frame = ("load_batch", "/home/me/train.py", 88)
TORCH: Frame = ("all_reduce", "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", 5)


def operation(
    sequence: int, kind: str = "all_reduce", *, done: float = 0.0, **different: Any
) -> dict[str, Any]:
    """Return an operation that a rank waits in, or that it completed ``done`` seconds ago."""
    return {
        "sequence": sequence, "state": COMPLETED if done else STARTED, "kind": kind, "type": "float32",
        "bytes": 25_000_000, "enqueued": NOW - 93, "started": NOW - 93, "completed": NOW - done if done else 0.0,
        "peer": -1, "waits_for": "", **different,
    }  # fmt: skip


def group(rank: int, *operations: dict[str, Any], size: int = 4, name: str = "0") -> dict[str, Any]:
    return {
        "name": name, "backend": "ccl", "size": size, "rank": rank, "count": len(operations),
        "operations": list(operations),
    }  # fmt: skip


def thread(*frames: Frame, name: str = "MainThread", idle: bool = True) -> dict[str, Any]:
    return {
        "id": 1,
        "name": name,
        "gil": False,
        "idle": idle,
        "frames": [list(f) for f in frames],
        "left_out": 0,
    }


def process(*frames: Frame, pid: int = 1, **different: Any) -> dict[str, Any]:
    return {
        "pid": pid, "parent": 0, "command": "python", "state": "S", "word": "sleeping", "stopped_by": None,
        "wchan": None, "call": None, "file": None, "blocked": [], "traced_by": 0, "tracer": None, "swapped": 0,
        "cpu": 1.0, "throttled": None, "threads": [thread(*frames)] if frames else [], "stacks": "py-spy",
        **different,
    }  # fmt: skip


def seen(
    rank: int,
    groups: Sequence[dict[str, Any]] = (),
    *processes: dict[str, Any],
    hosts: int = 2,
    left: str = "",
) -> Snapshot:
    """Return the snapshot of a rank.  Ranks are on two hosts in turn; a rank that has ``left`` is silent."""
    dump = Dump(1, NOW, list(groups), list(processes or (process(TORCH, MAIN),)), "")
    return Snapshot(rank, f"node{rank % hosts}", left, None if left else dump)


def others(*but: int, size: int = 4) -> list[Snapshot]:
    """Return the other ranks (not ``but``), which wait in their seventh all_reduce."""
    return [
        seen(rank, [group(rank, operation(6, done=94), operation(7))])
        for rank in range(size)
        if rank not in but
    ]


def explained(*ranks: Snapshot) -> Explanation:
    return explain(sorted(ranks, key=lambda each: each.rank))
