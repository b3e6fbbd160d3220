"""Measures the cost of saving a checkpoint while a rank trains.

    python scripts/bench/checkpoint.py [--rounds 5] [--mb 500] [--steps 100] [--directory DIR]

The checkpoint (weights and moments of AdamW) has --mb megabytes.  Each round has three blocks of --steps
steps: one without a save, one in which cpulaunch's thread of low priority writes the checkpoint, and one in
which a thread of normal priority does.

Prints, over the rounds: seconds of the block without a save; for both saves, the ratio of the block's time
and the difference of CPU time to the block without; and the seconds for which training stopped to copy.  A
warning follows if a save took longer than its block, as the block then lacks a part of the cost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import cpulaunch
from cpulaunch.runtime.checkpoint import saving

BATCH = 256


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=float, default=500)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-checkpoint-") as directory:
        measure(options, directory)
    return 0


def measure(options: argparse.Namespace, directory: str) -> None:
    block = prepared(options, directory)
    block(saving.NICE)  # from here on, memory for the copies is allocated
    calm: list[Block] = []
    found: dict[int, list[Block]] = {saving.NICE: [], 0: []}
    for _ in range(options.rounds):
        calm.append(block(None))
        for niceness, blocks in found.items():
            blocks.append(block(niceness))
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    print(f"{options.mb:g} MB, {options.rounds} rounds of {options.steps} steps, {threads} threads")
    print(f"{len(os.sched_getaffinity(0))} CPUs; {load:.1f} threads on this host want to run, ours included")
    print(f"step without a save, s      {spread([each.seconds / options.steps for each in calm])}")
    for niceness, blocks in found.items():
        pairs = list(zip(blocks, calm, strict=True))
        done = sum(each.done for each in blocks)
        print(f"writing at niceness {niceness}; done within the block: {done} of {options.rounds}")
        print(f"  with a save ÷ without     {spread([each.seconds / base.seconds for each, base in pairs])}")
        print(f"  more CPU time, s          {spread([each.cpu - base.cpu for each, base in pairs])}")
        print(f"  stood still to copy, s    {spread([each.stood for each in blocks])}")


class Block(NamedTuple):
    """Seconds of a block, its CPU seconds, seconds in which training stopped, and whether the save ended."""

    seconds: float
    cpu: float
    stood: float
    done: bool


def prepared(options: argparse.Namespace, directory: str) -> Callable[[int | None], Block]:
    """Return a function that trains for a block, with a save at a given niceness or without a save."""
    layers = 8
    width = int((options.mb * 1e6 / (3 * 4 * layers)) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = cpulaunch.prepare(model, optimizer)
    checkpoint = cpulaunch.Checkpoint(directory, model=model, optimizer=optimizer, every=10**8, keep=1)
    checkpoint.resume()
    data = torch.randn(BATCH, width)

    def block(niceness: int | None) -> Block:
        began, cpu, stood = time.perf_counter(), time.process_time(), 0.0
        for number in range(options.steps):
            with cpulaunch.autocast():
                loss = model(data).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.save_if_due()
            if niceness is not None and number == 0:
                saving.NICE = niceness
                before = time.perf_counter()
                checkpoint.save()
                stood = time.perf_counter() - before
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        waited = time.perf_counter()
        checkpoint.wait()
        return Block(seconds, cpu, stood, time.perf_counter() - waited < 0.01)

    return block


def spread(values: list[float]) -> str:
    return f"min {min(values):.3f}  median {statistics.median(values):.3f}  max {max(values):.3f}"


if __name__ == "__main__":
    sys.exit(main())
