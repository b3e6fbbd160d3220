"""What telemetry costs: of a step, and of BERT's training.

    python scripts/bench/telemetry.py [--rounds 5] [--steps 20] [--ranks 2]   BERT with and without it
    python scripts/bench/telemetry.py --parts                                 its parts, one by one

BERT is that of scripts/bench/training.py, under `cpulaunch run` with cpulaunch.prepare, in turn with and
without.  Printed: the ratio of a step's median time with telemetry to that without, over the rounds (min,
median, max).  Parts: CPU time of what is done in the program in each step and for each batch, and of what the
agent does once a second (12 steps) and every five seconds (/proc).
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

CALLS, BATCHES = 20_000, 10
RANKS = 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    return parts() if options.parts else jobs(options)


def jobs(options: argparse.Namespace) -> int:
    import training

    def stack(telemetry: str) -> training.Stack:
        said = ("--engine", "native", "--telemetry", telemetry)
        return training.Stack(telemetry, telemetry, "ours", "cpulaunch", options.ranks, said)

    asked = argparse.Namespace(intel=None, steps=options.steps, profile=False)
    ratios = []
    for number in range(options.rounds):
        order = ("file", "none") if number % 2 else ("none", "file")
        found = {how: training.run(stack(how), "bert", asked) for how in order}
        if (with_it := found["file"]) and (without := found["none"]):
            ratios.append(with_it["step_ms"] / without["step_ms"])
    if not ratios:
        return 1
    lowest, highest = min(ratios), max(ratios)
    print(f"{training.SHAPES['bert']}, {options.ranks} ranks; {len(ratios)} rounds of {options.steps} steps")
    print(f"  with ÷ without: {lowest:.3f} {statistics.median(ratios):.3f} {highest:.3f}")
    return 0


def parts() -> int:
    import torch

    from cpulaunch import ledger
    from cpulaunch.agent.telemetry import Telemetry
    from cpulaunch.agent.usage import Usage
    from cpulaunch.discovery.far_memory import far_share
    from cpulaunch.model.cores import CoreSet
    from cpulaunch.runtime.flops import Flops
    from cpulaunch.runtime.telemetry import Recorder, sizes

    memory = mmap.mmap(-1, ledger.SIZE)
    flops = Flops(torch)
    flops.give_up()  # what is counted once in 10,000 steps isn't the question
    recorder = Recorder(memory, flops)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    batch = {"input_ids": torch.ones(8, 128), "labels": torch.ones(8)}

    def took() -> None:
        recorder.took(1, 1, *sizes(batch, torch.Tensor))

    print("nanoseconds, in the program:")
    print(f"  a step   {fastest(lambda: recorder.stepped(optimizer)):6.0f}")
    print(f"  a batch  {fastest(took):6.0f}")
    print(f"  a step on gloo, more {gloo(torch):6.0f}")
    usage = Usage(os.getpid(), CoreSet(os.sched_getaffinity(0)), 0.0)
    agent = Telemetry(memory, usage, 1, 10.0)
    far = frozenset({1})  # so that its pages are asked for, on a machine without another node, too

    def look() -> None:
        for _ in range(12):
            recorder.stepped(optimizer)
        agent.last()

    print("microseconds, in the agent:")
    print(f"  12 steps {(fastest(look, 200) - 12 * fastest(lambda: recorder.stepped(optimizer))) / 1e3:6.0f}")
    print(f"  kernel   {fastest(lambda: usage.row(1.0), 50) / 1e3:6.0f}")
    print(f"  far memory {fastest(lambda: far_share(os.getpid(), far), 50) / 1e3:4.0f}")
    launcher()
    return 0


def gloo(torch: Any) -> float:
    """Nanoseconds that a step of DistributedDataParallel takes more where its group is gloo's."""
    from cpulaunch.runtime.communication import Communication

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    watched = Communication(torch)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
    taken = fastest(watched.stepped, 1000)
    torch.distributed.destroy_process_group()
    return taken


def launcher() -> None:
    from cpulaunch.messages import FROM_AGENT, StepRow, Steps
    from cpulaunch.supervise.rank import Rank
    from cpulaunch.supervise.telemetry import Telemetry
    from cpulaunch.wire import decode, encode

    rows = [
        list(StepRow(n, 1, 1e5 + n / 7, 0.1234567, 0.01, 0.01, 1e6, 0.001, 8, 1024, None, None))
        for n in range(32)
    ]
    line = encode(Steps(1e5, rows, {}, None, "")).strip()
    ranks = [Rank(number, "node") for number in range(RANKS)]
    telemetry = Telemetry(RANKS, 0.0)

    def hear(rank: Rank) -> None:
        message = decode(line, FROM_AGENT)
        assert isinstance(message, Steps)
        telemetry.heard(rank, message)

    def sum_up() -> None:
        hear(ranks[0])
        telemetry.summary()

    for rank in ranks:
        hear(rank)
    heard = fastest(lambda: hear(ranks[0]), 50)
    print("microseconds, in the launcher:")
    print(f"  a message of {len(rows)} rows    {heard / 1e3:6.0f}")
    print(f"  the summary of {RANKS:,} ranks {(fastest(sum_up, 50) - heard) / 1e3:6.0f}")


def fastest(call: Callable[[], object], calls: int = CALLS) -> float:
    """Nanoseconds of CPU time that a call takes, in the fastest of some batches."""
    found = []
    for _ in range(BATCHES):
        began = time.thread_time_ns()
        for _ in range(calls):
            call()
        found.append((time.thread_time_ns() - began) / calls)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
