"""What saving costs the steps of a training: steps without saves, and while a checkpoint is written, in turn.

    python scripts/bench/checkpoint.py [--rounds 5] [--mb 500] [--steps 100] [--directory DIR]

One rank trains a model whose checkpoint (weights, moments of AdamW) has so many MB (10⁶ bytes).  A round is
a block of steps without a save, and one of as many in which a save begins at the first.  Printed, over the
rounds: seconds of a step without, the time of the block with a save ÷ that without, and the seconds for
which the training stood still to copy.  The block should last longer than the writing: else part of the cost
is not in it, which is said.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import cpulaunch

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
    layers = 8
    width = int((options.mb * 1e6 / (3 * 4 * layers)) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = cpulaunch.prepare(model, optimizer)
    checkpoint = cpulaunch.Checkpoint(directory, model=model, optimizer=optimizer, every=10**8, keep=1)
    checkpoint.resume()
    data = torch.randn(BATCH, width)

    def steps(save: bool) -> tuple[float, float, bool]:
        """Seconds of the block, those in which it stood still, and whether the save was done within it."""
        began = time.perf_counter()
        stood = 0.0
        for number in range(options.steps):
            with cpulaunch.autocast():
                loss = model(data).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if save and number == 0:
                before = time.perf_counter()
                checkpoint.save()
                stood = time.perf_counter() - before
            checkpoint.save_if_due()
        seconds = time.perf_counter() - began
        waited = time.perf_counter()
        checkpoint.wait()
        return seconds, stood, time.perf_counter() - waited < 0.01

    steps(save=True)  # memory for the copies is there from here on
    without, ratios, stood, within = [], [], [], 0
    for _ in range(options.rounds):
        calm, _, _ = steps(save=False)
        busy, still, done = steps(save=True)
        without.append(calm / options.steps)
        ratios.append(busy / calm)
        stood.append(still)
        within += done
    threads = torch.get_num_threads()
    print(f"{options.mb:g} MB, {options.rounds} rounds of {options.steps} steps, {threads} threads")
    print(f"step without a save, s      {spread(without)}")
    print(f"with a save ÷ without       {spread(ratios)}")
    print(f"stood still to copy, s      {spread(stood)}")
    print(f"saves done within the block {within} of {options.rounds}")


def spread(values: list[float]) -> str:
    return f"min {min(values):.3f}  median {statistics.median(values):.3f}  max {max(values):.3f}"


if __name__ == "__main__":
    sys.exit(main())
