"""Measures the cost of a rank's ledger for small collectives.

    python scripts/bench/ledger.py [--rounds 5] [--calls 20000] [--ranks 1] [--backend ccl|gloo] [--telemetry]

Prints nanoseconds of an all_reduce of 4 bytes in the fastest of 20 batches, with and without a ledger (min,
median, max of the rounds); the median difference within a round; and its share of a step of 5 ms with 20
collectives. With one rank, nothing waits for another rank, so differences of nanoseconds show.

For ccl, the times are wall times of processes with and without a ledger.  For gloo, they are CPU times of
the calling thread, in one process that switches the ledger on and off: the wall time of gloo's own thread
depends on the cores on which the two threads run.  For gloo, the time of the thread that copies torch's
flight recorder is also printed.  Telemetry, which also watches collectives, is off without --telemetry.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time

from cpulaunch import ledger, variables

STEP, COLLECTIVES = 5e6, 20
"""Nanoseconds of the step, and its collectives."""

BATCHES = 20
LIMIT = 300


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", default="ccl")
    parser.add_argument("--telemetry", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return be_rank(options.backend, options.calls, options.rank)
    times: dict[str, list[float]] = {"without": [], "with": []}
    looks = []
    for _ in range(options.rounds):
        if options.backend == "ccl":
            said = {how: run(options.ranks, how, options)["with"] for how in times} | {"look": 0}
        else:
            said = run(options.ranks, "both", options)
        for how, found in times.items():
            found.append(said[how])
        looks.append(said["look"])
    added = statistics.median(b - a for a, b in zip(times["without"], times["with"], strict=True))
    print(f"{options.backend}, ranks: {options.ranks}; ns for each all_reduce of 4 bytes:")
    for how, found in times.items():
        print(f"  {how:8} {min(found):7.0f} {statistics.median(found):7.0f} {max(found):7.0f}")
    print(f"  adds {added:.0f} ns, {100 * added * COLLECTIVES / STEP:.3f} % of the step")
    if look := max(looks):
        print(f"  a look of the thread takes {look / 1e3:.0f} us at most")
    return 0


def run(ranks: int, how: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the output of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    common["CPULAUNCH_TELEMETRY"] = "file" if options.telemetry else "none"
    command = [sys.executable, __file__, "--backend", options.backend, "--calls", str(options.calls)]
    started = [
        subprocess.Popen(
            [*command, "--rank", how],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        out = [each.communicate(timeout=LIMIT)[0] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    return json.loads(out[0].splitlines()[-1])


def be_rank(backend: str, calls: int, how: str) -> int:
    import torch
    import torch.distributed as dist

    from cpulaunch.runtime.install import install
    from cpulaunch.runtime.observe import ledger as of_runtime

    def way() -> tuple[object, object]:
        return dist.ProcessGroup.__dict__["allreduce"], dist.Work.__dict__["wait"]

    bare = way()
    if how != "without":
        ledger.of_this_process = mmap.mmap(-1, ledger.SIZE)
        os.environ.setdefault(variables.JOB_ID, "bench")
        install()
    dist.init_process_group(backend)
    clock = time.thread_time_ns if how == "both" else time.perf_counter_ns
    ways = {"with": way()}
    if how == "both":
        ways["without"] = bare
    x = torch.ones(1)
    batches: dict[str, list[float]] = {name: [] for name in ways}
    for batch in range(-2, BATCHES):  # the first two are warm-up
        for name, (call, wait) in ways.items():
            dist.ProcessGroup.allreduce, dist.Work.wait = call, wait  # type: ignore[method-assign,assignment]
            dist.barrier()
            before = clock()
            for _ in range(calls // BATCHES):
                dist.all_reduce(x)
            if batch >= 0:
                batches[name].append((clock() - before) / (calls // BATCHES))
    said = {name: min(found) for name, found in batches.items()}
    said["look"] = 0
    if how == "both":
        (mirror,) = of_runtime.mirrors
        before = time.thread_time_ns()
        mirror.look()
        said["look"] = time.thread_time_ns() - before
    if dist.get_rank() == 0:
        print(json.dumps(said))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
