"""Programs whose steps are traced, and the properties of a merged trace."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

PROGRAM = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader

backend, case, steps = sys.argv[1:] or ("gloo", "dies", "1000000")
steps = int(steps)
dist.init_process_group(backend)
rank = dist.get_rank()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * steps
    def __getitem__(self, index):
        if case == "slow loader":
            time.sleep(0.01)
        return torch.randn(64), index % 4

net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
print("ready", flush=True)
if case == "throttled" and rank == 1:
    pathlib.Path(os.environ["GROUP"]).write_text(str(os.getpid()))
for done, (x, y) in enumerate(DataLoader(Data(), batch_size=8), 1):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    if case == "slow rank" and rank == 1:
        time.sleep(0.1)
    if case == "throttled" and rank == 1:
        until = time.thread_time() + 0.005
        while time.thread_time() < until: pass
    optimizer.step()
    optimizer.zero_grad()
    if pathlib.Path("go").exists():
        break
    if case == "dies" and rank == 1 and pathlib.Path("die").exists():
        os.kill(os.getpid(), 9)
"""


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def check_format(events: list[dict[str, Any]]) -> None:
    """Assert the rules of Chrome's trace format that Perfetto needs.

    A thread's events with a duration are nested, as Perfetto drops those that only overlap, and each end of
    an arrow is within one of them.  Perfetto counts in nanoseconds.  Sources: Trace Event Format (Google),
    "Duration Events" and "Flow Events"; https://perfetto.dev/docs/faq; google/perfetto#928 and #4280.
    """
    threads: dict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "XMstf"
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            begin, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
            assert duration >= 0
            threads[event["pid"], event["tid"]].append((begin, begin + duration, event["name"]))
    for spans in threads.values():
        around: list[tuple[int, int, str]] = []  # unfinished events
        for span in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1][1] <= span[0]:
                around.pop()
            assert not around or span[1] <= around[-1][1], (around[-1], span)
            around.append(span)
    flows: dict[tuple[str, int], list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            at = round(event["ts"] * 1000)
            assert any(begin <= at <= end for begin, end, _ in threads[event["pid"], event["tid"]])
            flows[event["cat"], event["id"]].append(event["ph"])
    assert all(phases.count("s") == 1 == phases.count("f") for phases in flows.values())


def check(events: list[dict[str, Any]], ranks: int, *, backend: str, late: float = 1.0) -> list[str]:
    """Assert that the merged trace of ``ranks`` ranks is complete. Returns the names of its steps.

    By up to ``late`` milliseconds, a collective may seem to end before the last rank has begun it.
    """
    check_format(events)
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [name.partition(" ·")[0] for _, name in sorted(rows.items())] == [
        f"rank {n}" for n in range(ranks)
    ]
    steps = defaultdict(list)
    for event in events:
        if event.get("cat") == "step":
            steps[event["pid"]].append(event["name"])
    assert len(set(map(tuple, steps.values()))) == 1
    calls: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "collective" and event["ph"] == "X":
            assert event["name"].startswith(f"{backend}:")
            calls[event["args"]["group"], event["args"]["number"]].append(event)
    arrows: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "collective" and event["ph"] in "stf":
            arrows[event["id"]].append(event)
    assert len(calls) == len(arrows) > 0
    for parts in calls.values():
        assert len(parts) == ranks
        last = max(part["ts"] for part in parts)
        assert all(part["ts"] + part["dur"] >= last - 1e3 * late for part in parts)
    for joined in arrows.values():
        assert sorted(event["pid"] for event in joined) == sorted(rows)
        assert [e["ph"] for e in sorted(joined, key=lambda e: e["ts"])] == ["s", *"t" * (ranks - 2), "f"]
    return steps[1]
