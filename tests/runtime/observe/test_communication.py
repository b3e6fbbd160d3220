"""The time of gloo's collectives, observed from outside, with two real ranks as processes of the test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from support.command import TIMEOUT

PROGRAM = """
import json, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from cpulaunch.runtime.observe.communication import Communication
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
watched = Communication(torch)
watched.watch_calls(dist.ProcessGroup)
watched.watch_waits(dist.Work)
watched.watch_parallel(DistributedDataParallel)
found = {}
def step(name, work):
    dist.barrier()
    watched.end_step()
    before = watched.busy, watched.waiting, watched.bytes
    began = time.monotonic_ns()
    work()
    took = time.monotonic_ns() - began
    watched.end_step()
    now = watched.busy, watched.waiting, watched.bytes
    busy, waiting, size = (one - other for one, other in zip(now, before))
    found[name] = {"took": took, "busy": busy, "waiting": waiting, "bytes": size}
def collective():
    time.sleep(0.3 * rank)
    dist.all_reduce(torch.ones(100))
def asynchronous():
    work = dist.all_reduce(torch.ones(100), async_op=True)
    time.sleep(0.3)
    work.wait()
def gather():
    dist.all_gather([torch.ones(10), torch.ones(10)], torch.ones(10))
model = DistributedDataParallel(torch.nn.Linear(10, 10))
def backward():
    time.sleep(0.3 * rank)
    model(torch.ones(4, 10)).sum().backward()
def accumulating():
    with model.no_sync():
        model(torch.ones(4, 10)).sum().backward()
step("collective", collective)
step("asynchronous", asynchronous)
step("gather", gather)
for name in ("first", "second", "backward"):  # in the second one, its buckets are made anew
    step(name, backward)
step("accumulating", accumulating)
print(json.dumps(found))
"""


def ranks() -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port], env=env, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [each.communicate(timeout=TIMEOUT)[0] for each in started]
        assert [each.returncode for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()
            each.wait(TIMEOUT)
    return [json.loads(each) for each in said]


@pytest.mark.slow
def test_the_time_of_gloo_in_a_step() -> None:
    first, late = ranks()
    for name in ("collective", "backward"):
        assert first[name]["waiting"] > 0.2e9  # rank 1 joins 0.3 s later
        assert late[name]["waiting"] < first[name]["waiting"]
        for rank in (first, late):
            assert rank[name]["waiting"] <= rank[name]["busy"] <= rank[name]["took"]
    for rank in (first, late):
        # The communication is hidden behind the program's work.
        assert rank["asynchronous"]["busy"] > 0.3e9 > 2 * rank["asynchronous"]["waiting"]
        assert {name: each["bytes"] for name, each in rank.items()} == {
            "collective": 400, "asynchronous": 400, "gather": 40, "first": 440, "second": 440,
            "backward": 440, "accumulating": 0,
        }  # fmt: skip
        assert rank["accumulating"]["busy"] == rank["accumulating"]["waiting"] == 0
