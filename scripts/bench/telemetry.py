"""Measures the cost of telemetry for a step of BERT, for the agent and the launcher, and for its parts.

    python scripts/bench/telemetry.py [--pairs 100] [--block 2] [--ranks 2] [--backend ccl]
    python scripts/bench/telemetry.py --parts        its parts, one by one
    python scripts/bench/telemetry.py --counts       system calls and bytes of whole jobs, with and without

BERT is as in scripts/bench/training.py, with batches from a DataLoader and cpulaunch.prepare.  Separate
jobs differ by more than telemetry costs, so one job alternates blocks of steps with telemetry and with
plain torch, in alternating order.  Prints the ratio of the time of a step in neighbouring blocks: minimum,
median with its 95 % confidence interval (from order statistics), maximum.  As a control, the same is done
with two equal blocks.  CPU time is that of the rank's process, in which ccl also waits.  Telemetry's
functions are timed in some further steps by the wall clock. The CPU time of the agent and the launcher is
that of this job, and of another job with `--telemetry none`.

Counts: two ranks make small steps on gloo for ``SECONDS``, in jobs with and without telemetry in turn.  The
kernel counts each process's read and write calls (/proc/PID/io), on which other load hardly has an effect.

Parts: CPU time of the program's work in each step and for each batch, and of the agent's work once a second
(12 steps) and every five seconds (/proc).
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

CALLS, BATCHES = 20_000, 10
RANKS = 1024
LIMIT = 1100.0  # seconds for a job
WARM = 6  # warm-up steps: FLOPs are counted in the third, and the peak is measured
TIMED = 20  # steps
SECONDS, PAUSE, AT_ONCE, ROUNDS = 20.0, 0.004, 50, 2  # of --counts
DDP_RATE = 100  # DistributedDataParallel's timer measures one of this many steps, by torch's default


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100, help="blocks with and without")
    parser.add_argument("--block", type=int, default=2, help="steps of a block")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=["ccl", "gloo"], default="ccl")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_rank:
        return count_in_rank() if options.counts else in_rank(options)
    if options.counts:
        return counts(options)
    return parts() if options.parts else jobs(options)


# --- BERT with and without


def jobs(options: argparse.Namespace) -> int:
    import training

    if (with_it := job(options, "file")) is None:
        return 1
    own, step = with_it["own_us"], with_it["step_ms"]
    print(f"{training.SHAPES['bert']}, {options.ranks} ranks, {options.backend};", end=" ")
    print(f"{options.pairs} pairs of blocks of {options.block} steps, {step:.0f} ms a step\n")
    print(f"telemetry's functions in the program: {own:.0f} µs a step, {own / step / 10:.4f} % of it\n")
    print("| a step with ÷ without | least | median (95 %) | largest |\n|---|---|---|---|")
    show(with_it, "")
    if (without := job(options, "none")) is None:
        return 1
    show(without, ", without in both")
    print("\n| CPU time, ms a second | with | without |\n|---|---|---|")
    for who in ("agent", "launcher"):
        print(f"| {who} | {with_it[who]:.1f} | {without[who]:.1f} |")
    return 0


def show(found: dict[str, Any], how: str) -> None:
    for key, label in (("wall", "time"), ("cpu", "CPU time")):
        low, high = interval(found[key])
        middle = f"{statistics.median(found[key]):.4f} ({low:.4f} to {high:.4f})"
        print(f"| {label}{how} | {min(found[key]):.3f} | {middle} | {max(found[key]):.3f} |", flush=True)


def job(options: argparse.Namespace, telemetry: str) -> dict[str, Any] | None:
    """Return the measurements of rank 0 of a job."""
    binaries = Path(sys.executable).parent
    command = [
        binaries / "cpulaunch", "run", "-n", options.ranks, "--engine", "native", "--telemetry", telemetry,
        "--backend", options.backend, "--oversubscribe", Path(__file__).resolve(), "--in-rank",
        "--pairs", options.pairs, "--block", options.block, *(["--counts"] if options.counts else []),
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CPULAUNCH_", "OMP_", "CCL_"))}
    environment |= {"PATH": f"{binaries}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [*map(str, command)], cwd=directory, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
            process.wait()
    for line in out.splitlines():
        if "MEASURED " in line:
            found: dict[str, Any] = json.loads(line.partition("MEASURED ")[2])
            return found
    print(f"failed:\n{err[-2000:]}", file=sys.stderr)
    return None


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, computed from order statistics."""
    ordered, count = sorted(values), len(values)
    at, left = 0, 0.0
    while (left := left + math.comb(count, at) / 2**count) <= 0.025:
        at += 1
    at = max(0, at - 1)
    return ordered[at], ordered[-1 - at]


def in_rank(options: argparse.Namespace) -> int:
    import torch
    import training

    import cpulaunch
    from cpulaunch.runtime.observe import telemetry

    torch.manual_seed(0)
    model, (tokens, labels) = training.make("bert")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = [{"input_ids": tokens[n], "labels": labels[n]} for n in range(len(tokens))]
    loader = torch.utils.data.DataLoader(samples, batch_size=len(tokens))
    model, optimizer = cpulaunch.prepare(model, optimizer)
    batches = forever(loader)

    def block(steps: int) -> tuple[float, float]:
        """Seconds, and seconds of CPU time, of a step."""
        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            batch = next(batches)
            with cpulaunch.autocast():
                loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (time.perf_counter() - began) / steps, (time.process_time() - used) / steps

    block(WARM)
    switch = Switch(torch, model, telemetry.recorder) if telemetry.recorder else None
    found, others, began = [], others_used(), time.monotonic()
    for number in range(options.pairs):
        pair = {}
        for on in (True, False) if number % 2 else (False, True):
            if switch:
                switch.turn(on)
            pair[on] = block(options.block)
        found.append(pair)
    lasted = time.monotonic() - began
    agent, launcher = (1e3 * (b - a) / lasted for a, b in zip(others, others_used(), strict=True))
    if switch:
        switch.turn(True)
    own = Timed(telemetry) if switch else None
    block(TIMED)
    result = {
        "own_us": own.nanoseconds / 1e3 / TIMED if own else 0.0,
        "wall": [pair[True][0] / pair[False][0] for pair in found],
        "cpu": [pair[True][1] / pair[False][1] for pair in found],
        "step_ms": 1e3 * statistics.median(pair[False][0] for pair in found),
        "agent": agent,
        "launcher": launcher,
    }
    if os.environ["RANK"] == "0":
        print("MEASURED " + json.dumps(result), flush=True)
    return 0


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def others_used() -> tuple[float, float]:
    """Return the seconds of CPU time that this rank's agent and its launcher have used."""
    agent = os.getppid()
    return used(agent)["cpu"] / 1e3, used(parent_of(agent))["cpu"] / 1e3


class Switch:
    """Removes telemetry's hooks from the program, and installs them again."""

    def __init__(self, torch: Any, model: Any, recorder: Any) -> None:
        from cpulaunch.runtime.observe import communication

        self._recorder, self._end_step = recorder, recorder.end_step
        places = [(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__")]
        if recorder.communication:  # if the group isn't ccl's
            groups = torch._C._distributed_c10d
            places += [(groups.Work, "wait"), *((groups.ProcessGroup, name) for name in communication.CALLS)]
        self._places = [
            (place, name, getattr(place, name), getattr(place, name).__wrapped__)
            for place, name in places
            if hasattr(getattr(place, name, None), "__wrapped__")
        ]
        self._model = model if recorder.communication else None

    def turn(self, on: bool) -> None:
        self._recorder.end_step = self._end_step if on else lambda optimizer: None
        for place, name, ours, original in self._places:
            setattr(place, name, ours if on else original)
        if self._model is not None and hasattr(self._model, "_set_ddp_runtime_logging_sample_rate"):
            self._model._set_ddp_runtime_logging_sample_rate(1 if on else DDP_RATE)


class Timed:
    """Measures the time of telemetry's functions that are called in each step."""

    def __init__(self, telemetry: Any) -> None:
        self.nanoseconds = 0
        telemetry.sizes = self._timed(telemetry.sizes)
        for name in ("add_batch", "end_step"):
            setattr(telemetry.recorder, name, self._timed(getattr(telemetry.recorder, name)))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter_ns()
            found = original(*args)
            self.nanoseconds += time.perf_counter_ns() - began
            return found

        return call


# --- system calls and bytes


def counts(options: argparse.Namespace) -> int:
    options.backend = "gloo"
    print("| telemetry | program: calls a step | agent: calls, bytes, CPU ms a second | launcher: the same |")
    print("|---|---|---|---|")
    for telemetry in ("file", "none") * ROUNDS:
        if (found := job(options, telemetry)) is None:
            return 1
        others = " | ".join(
            f"{each['calls']:.1f}, {each['bytes']:,.0f}, {each['cpu']:.1f}" for each in found["others"]
        )
        print(f"| {telemetry} | {found['calls']:.2f} | {others} |", flush=True)
    return 0


def count_in_rank() -> int:
    import torch

    distributed = torch.distributed
    distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    agent = os.getppid()
    who = os.getpid(), agent, parent_of(agent)

    def steps(count: int) -> None:
        for _ in range(count):
            time.sleep(PAUSE)
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    steps(WARM)
    before, began, made, lasted = [*map(used, who)], time.monotonic(), 0, torch.zeros(1)
    while lasted[0] < SECONDS:
        steps(AT_ONCE)
        made += AT_ONCE
        lasted[0] = time.monotonic() - began
        distributed.broadcast(lasted, 0)  # all ranks must make the same number of steps
    program, *others = (
        {name: now[name] - then[name] for name in now}
        for then, now in zip(before, map(used, who), strict=True)
    )
    rates = [{name: value / lasted.item() for name, value in each.items()} for each in others]
    if os.environ["RANK"] == "0":
        print("MEASURED " + json.dumps({"calls": program["calls"] / made, "others": rates}), flush=True)
    distributed.destroy_process_group()
    return 0


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def used(pid: int) -> dict[str, float]:
    """Read and write calls, their bytes, and milliseconds of CPU time of a process."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    io = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    cpu = sum(int(path.read_text().split()[0]) / 1e6 for path in threads)
    return {"calls": io["syscr"] + io["syscw"], "bytes": io["rchar"] + io["wchar"], "cpu": cpu}


# --- its parts


def parts() -> int:
    import torch

    from cpulaunch import ledger
    from cpulaunch.agent.observe.telemetry import Telemetry
    from cpulaunch.agent.observe.usage import Usage
    from cpulaunch.discovery.host.far_memory import far_share
    from cpulaunch.model.cores import CoreSet
    from cpulaunch.runtime.observe.telemetry import Recorder, sizes

    memory = mmap.mmap(-1, ledger.SIZE)
    recorder = Recorder(memory)  # without FLOPs, which are counted only once in 10,000 steps
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    batch = {"input_ids": torch.ones(8, 128), "labels": torch.ones(8)}

    def took() -> None:
        recorder.add_batch(1, 1, *sizes(batch, torch.Tensor))

    print("nanoseconds, in the program:")
    print(f"  a step   {fastest(lambda: recorder.end_step(optimizer)):6.0f}")
    print(f"  a batch  {fastest(took):6.0f}")
    print(f"  a step on gloo, more {gloo(torch):6.0f}")
    usage = Usage(os.getpid(), CoreSet(os.sched_getaffinity(0)), 0.0)
    agent = Telemetry(memory, usage, 1, 10.0)
    far = frozenset({1})  # a far node, which makes the agent look at memory even on a machine with one node

    def look() -> None:
        for _ in range(12):
            recorder.end_step(optimizer)
        agent.last()

    print("microseconds, in the agent:")
    print(
        f"  12 steps {(fastest(look, 200) - 12 * fastest(lambda: recorder.end_step(optimizer))) / 1e3:6.0f}"
    )
    print(f"  kernel   {fastest(lambda: usage.row(1.0), 50) / 1e3:6.0f}")
    print(f"  far memory {fastest(lambda: far_share(os.getpid(), far), 50) / 1e3:4.0f}")
    launcher()
    return 0


def gloo(torch: Any) -> float:
    """Return how many nanoseconds longer a step of DistributedDataParallel takes if its group is gloo's."""
    from cpulaunch.runtime.observe.communication import Communication

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    watched = Communication(torch)
    watched.watch_parallel(torch.nn.parallel.DistributedDataParallel)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
    taken = fastest(watched.end_step, 1000)
    torch.distributed.destroy_process_group()
    return taken


def launcher() -> None:
    from cpulaunch.messages import FROM_AGENT, StepRow, Steps
    from cpulaunch.supervise.job.rank import Rank
    from cpulaunch.supervise.telemetry.rows import Telemetry
    from cpulaunch.wire import decode, encode

    rows = [
        list(StepRow(n, 1, 1e5 + n / 7, [0.1234567, 0.01, 0.01, 1e6, 0.001, 8, 1024, None, None]))
        for n in range(32)
    ]
    line = encode(Steps(1e5, rows, {}, None, "")).strip()
    ranks = [Rank(number, "node") for number in range(RANKS)]
    telemetry = Telemetry(RANKS, 0.0)

    def hear(rank: Rank) -> None:
        message = decode(line, FROM_AGENT)
        assert isinstance(message, Steps)
        telemetry.add_steps(rank, message)

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
    """Return the nanoseconds of CPU time of a call, in the fastest of some batches."""
    found = []
    for _ in range(BATCHES):
        began = time.thread_time_ns()
        for _ in range(calls):
            call()
        found.append((time.thread_time_ns() - began) / calls)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
