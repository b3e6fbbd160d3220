"""Several hosts: how long a start takes, and how fast training is over links of known speed.

    python scripts/bench/multihost.py [start] [training] [--rounds N]

Needs root: the hosts are network namespaces of this machine (tests/support/namespaces.py), with a real sshd
each, so all ranks share its cores.  Prints Markdown tables: min / median / max of rounds in turn, ratios
within a round.

``start``: seconds from the command to the first line that a rank prints, 4 hosts with one rank each: the
bare mpiexec.hydra, cpulaunch without and with preflight.
``training``: milliseconds of a DDP step of an MLP with 8 M parameters (fp32 gradients of 32 MB), 2 hosts
with one rank each, over a link shaped with tc; with gloo, and with ccl where its group is built; gradients
as they are, and with `--compress-gradients bf16`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from support.faults import Cluster  # noqa: E402
from support.namespaces import why_not  # noqa: E402

TIMEOUT = 300.0
"""Seconds that one run may take."""

COMPRESSION = {"fp32": "none", "bf16": "bf16"}
PRINT = "print('line', flush=True)"

TRAIN = """\
import time
import torch, torch.distributed as dist
from torch import nn
import cpulaunch

cpulaunch.init()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
model, optimizer = cpulaunch.prepare(model, torch.optim.AdamW(model.parameters()))
x = torch.randn(16, 1024)
times = []
for step in range(12):
    started = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    times.append(time.perf_counter() - started)
if cpulaunch.is_main():
    print("ms", 1000 * sorted(times[2:])[5])
dist.destroy_process_group()
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=[[], "start", "training"], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if problem := why_not():
        print(f"no hosts: {problem}", file=sys.stderr)
        return 1
    hosts = ("node0", "node1", "node2", "node3")
    with Cluster(("login", *hosts)) as cluster:
        work = cluster.directory / "work"
        work.mkdir()
        if "start" in options.what or not options.what:
            start(cluster, cluster.hostfile(work / "four", hosts), work, options.rounds)
        if "training" in options.what or not options.what:
            training(cluster, cluster.hostfile(work / "two", hosts[:2]), work, options.rounds)
    return 0


def start(cluster: Cluster, hostfile: Path, work: Path, rounds: int) -> None:
    mpiexec = Path(sys.executable).parent / "mpiexec.hydra"
    (script := work / "line.py").write_text(PRINT)
    ours = [sys.executable, "-m", "cpulaunch", "run", "-f", hostfile, "-ppn", "1"]
    commands = {
        "mpiexec.hydra": [mpiexec, "-f", hostfile, "-n", "4", "-ppn", "1", sys.executable, script],
        "cpulaunch run --skip-preflight": [*ours, "--skip-preflight", script],
        "cpulaunch run": [*ours, script],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            times[name].append(first_line(cluster, command, work))
    print("| 4 hosts, 1 rank each | s to the first line | / mpiexec.hydra | s more than it |")
    print("|---|---|---|---|")
    raw = times["mpiexec.hydra"]
    for name, each in times.items():
        ratios = [mine / theirs for mine, theirs in zip(each, raw, strict=True)]
        more = [mine - theirs for mine, theirs in zip(each, raw, strict=True)]
        print(f"| `{name}` | {spread(each)} | {spread(ratios)} | {spread(more)} |")
    print()


def first_line(cluster: Cluster, command: Iterable[object], work: Path) -> float:
    started = time.perf_counter()
    with cluster.start("node0", [str(word) for word in command], directory=work) as process:
        assert process.stdout
        line = process.stdout.readline()
        took = time.perf_counter() - started
        _, err = process.communicate(timeout=TIMEOUT)
    if "line" not in line or process.returncode:
        raise RuntimeError(f"{command} failed: {err}")
    return took


def training(cluster: Cluster, hostfile: Path, work: Path, rounds: int) -> None:
    (script := work / "train.py").write_text(TRAIN)
    kinds = [(backend, bits) for backend in backends() for bits in ("fp32", "bf16")]
    print("| link | backend | gradients | ms a step | gloo fp32 / this |\n|---|---|---|---|---|")
    for rate in ("1gbit", "10gbit"):
        times: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
        with ExitStack() as shaped:
            for name in ("node0", "node1"):
                shaped.enter_context(cluster.shaped(name, rate))
            for _ in range(rounds):
                for kind in kinds:
                    times[kind].append(step(cluster, hostfile, script, *kind))
        for (backend, bits), each in times.items():
            ratios = [first / mine for first, mine in zip(times["gloo", "fp32"], each, strict=True)]
            print(f"| {rate[:-4]} Gbit/s | {backend} | {bits} | {spread(each, 0)} | {spread(ratios)} |")


def step(cluster: Cluster, hostfile: Path, script: Path, backend: str, bits: str) -> float:
    command = [sys.executable, "-m", "cpulaunch", "run", "-f", hostfile, "-ppn", "1", "--threads", "1"]
    options = ["--precision", "fp32", "--backend", backend, "--compress-gradients", COMPRESSION[bits]]
    done = cluster.run("node0", [*command, *options, script], timeout=TIMEOUT, directory=script.parent)
    found = re.search(r"ms ([\d.]+)", done.stdout)
    if not found:
        raise RuntimeError(f"{backend}, {bits}: {done.stderr}")
    return float(found[1])


def backends() -> tuple[str, ...]:
    """Those that can be used here."""
    from cpulaunch.ccl.installed import state

    return ("gloo", "ccl") if state().built else ("gloo",)


def spread(values: list[float], digits: int = 2) -> str:
    return " / ".join(f"{f(values):.{digits}f}" for f in (min, statistics.median, max))


if __name__ == "__main__":
    sys.exit(main())
