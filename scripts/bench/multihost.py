"""Measures starts, training and collectives on several hosts, with links of known speed.

    python scripts/bench/multihost.py [start] [training] [collectives] [--rounds N]
    python scripts/bench/multihost.py training --layouts 2x1 2x2 --rates 1gbit 10gbit
    python scripts/bench/multihost.py collectives --layouts 2x2 3+1 --sizes 1048576 --operations broadcast

Needs root: the hosts are network namespaces of this machine with a real sshd each
(tests/support/namespaces.py), so all ranks share its cores.  A layout is HOSTSxRANKS, or the ranks of each
host, such as 3+1.  Prints Markdown tables with min / median / max of the rounds; contenders take turns, and
ratios are of one round.

``start``: seconds from the command to the first line that a rank prints, with one rank on each of 4 hosts,
for mpiexec.hydra, and for cpulaunch without and with preflight.

``training``: milliseconds of a DDP step of an MLP with 32 MB of gradients, on gloo and on ccl, with and
without `--compress-gradients bf16`.  The layout is 2x2 by default, and tc limits the rates of the links.

``collectives``: milliseconds of an operation on float32 tensors (median repetition of the slowest rank),
and the bytes that the busiest host sends ÷ those of the tensor.  Contenders have groups in the same
processes and take turns of a tenth of a second; a round's ratio is the median over its turns.

- ccl and gloo are pinned: local rank i to core i or, with ``--pin rank``, rank i.  "gloo, free" is not
  pinned.
- For all_gather, reduce_scatter and all_to_all, the size counts all ranks' parts together.  all_reduces are
  eight asynchronous all_reduces of an eighth of the size each.  In all_reduce_shared, ccl's tensor is in
  memory that the ranks of a host share, like DDP's buckets after `prepare`.  send_recv is half a round trip
  between rank 0 and another rank.
- With ``--over libfabric``, ccl uses libfabric between hosts, and is compared with oneCCL, in separate
  processes. oneCCL's allreduce uses a ring from 64 KB on, and recursive doubling below.
- ``--json FILE`` keeps all samples.
- ``--congestion`` sets the hosts' TCP congestion control.  bbr's pacing slows these links down for minutes
  at a time, so use cubic or reno.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from support.faults import Cluster  # noqa: E402
from support.namespaces import why_not  # noqa: E402
from support.ranks import answers, hosts_of, started_ranks  # noqa: E402

from cpulaunch.bench.limits import least_wire  # noqa: E402

TIMEOUT = 300.0
"""Seconds that one run may take."""

LAYOUTS = {"training": ("2x2",), "collectives": ("2x1", "2x2", "4x2", "2x4")}
RATES = ("1gbit", "10gbit")  # the rate of each host's link
SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes
OPERATIONS = (
    "all_reduce",
    "all_reduces",
    "all_reduce_shared",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send_recv",
)


class Contender(NamedTuple):
    """A measured configuration.  Those with the same variables share processes."""

    backend: str
    pinned: bool = True
    variables: Mapping[str, str] = MappingProxyType({})

    def argument(self, pin: str) -> str:
        """Return the contender's name for collectives_rank.py."""
        return f"{self.backend}:{pin if self.pinned else 'free'}"


OFI = {"CPULAUNCH_RANK_CCL_TRANSPORT": "ofi"}
ONECCL = OFI | {"CCL_ALLREDUCE": "recursive_doubling:0-65535;ring:65536-max"}
CONTENDERS = {
    "sockets": {"gloo": Contender("gloo"), "gloo, free": Contender("gloo", False), "ccl": Contender("ccl")},
    "libfabric": {
        "oneCCL": Contender("ccl", variables=ONECCL),
        "gloo": Contender("gloo", variables=OFI),
        "ccl": Contender("ccl", variables=OFI),
    },
}
"""Contenders by ccl's transport between hosts.  The last one of each is compared with the best of the
others."""

PINS = {"local": "the rank on the host", "rank": "the rank"}
RANK = Path(__file__).with_name("collectives_rank.py")

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


class Case(NamedTuple):
    """The measurement of one set of ranks."""

    operation: str
    layout: str
    pin: str  # how ranks are pinned, if they are
    over: str  # the transport of ccl between hosts


class Sample(NamedTuple):
    """The measurements of one round for one contender and size."""

    operation: str
    layout: str
    pin: str
    over: str
    contender: str
    size: int  # bytes
    round: int
    ms: list[float]  # median repetition of the slowest rank, for each turn
    wire: float  # bytes that the busiest host sent ÷ bytes of the tensor
    repetitions: int  # in a turn


def main() -> int:
    options = arguments()
    if problem := why_not():
        print(f"no hosts: {problem}", file=sys.stderr)
        return 1
    hosts = ("node0", "node1", "node2", "node3")
    with Cluster(("login", *hosts)) as cluster:
        for host in hosts if options.congestion else ():
            control_congestion(cluster, host, options.congestion)
        print(f"TCP's congestion control: {read_congestion(cluster, hosts[0])}\n", flush=True)
        work = cluster.directory / "work"
        work.mkdir()
        if "start" in options.what or not options.what:
            start(cluster, cluster.hostfile(work / "four", hosts), work, options.rounds)
        if "training" in options.what or not options.what:
            training(cluster, work, options)
        if "collectives" in options.what or not options.what:
            return collectives(cluster, options)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=[[], "start", "training", "collectives"], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", metavar="HOSTSxRANKS")
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS[:1])
    parser.add_argument("--pin", choices=PINS, default="local")
    parser.add_argument("--over", choices=CONTENDERS, default="sockets")
    parser.add_argument("--congestion", metavar="ALGORITHM")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"


def control_congestion(cluster: Cluster, host: str, algorithm: str) -> None:
    """Set the congestion control of connections that the host opens from now on."""
    done = cluster.run(host, ["sh", "-c", f"echo {shlex.quote(algorithm)} > {CONGESTION}"])
    if done.returncode:
        allow = f"sysctl -w net.ipv4.tcp_allowed_congestion_control='reno {algorithm}'"
        raise SystemExit(f"no congestion control {algorithm} in {host}; to allow it: {allow}")


def read_congestion(cluster: Cluster, host: str) -> str:
    return cluster.run(host, ["cat", CONGESTION]).stdout.strip()


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


def training(cluster: Cluster, work: Path, options: argparse.Namespace) -> None:
    (script := work / "train.py").write_text(TRAIN)
    print("gradients of 32 MB, ms a step; ratios min/median/max of the rounds\n")
    print("| layout | link | gradients | gloo | ccl | gloo ÷ ccl | gloo fp32 ÷ ccl | ccl fp32 ÷ ccl |")
    print("|---|---|---|---|---|---|---|---|")
    for layout in options.layouts or LAYOUTS["training"]:
        slots = Counter(hosts_of(layout))
        hostfile = cluster.hostfile(work / layout, tuple(slots), tuple(slots.values()))
        for rate in options.rates:
            with ExitStack() as shaped:
                for name in slots:
                    shaped.enter_context(cluster.shaped(name, rate))
                times = steps(cluster, hostfile, script, options.rounds)
            print(*training_rows(layout, rate, times), sep="\n", flush=True)


def steps(cluster: Cluster, hostfile: Path, script: Path, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return the milliseconds of a step in each round, by backend and precision of gradients."""
    times: dict[tuple[str, str], list[float]] = {
        (backend, bits): [] for bits in COMPRESSION for backend in ("gloo", "ccl")
    }
    for _ in range(rounds):
        for (backend, bits), each in times.items():
            each.append(step(cluster, hostfile, script, backend, bits))
    return times


def training_rows(layout: str, rate: str, times: dict[tuple[str, str], list[float]]) -> Iterator[str]:
    for bits in COMPRESSION:
        ours = times["ccl", bits]
        others = (times["gloo", bits], times["gloo", "fp32"], times["ccl", "fp32"])
        ratios = (
            spread([theirs / mine for theirs, mine in zip(other, ours, strict=True)]) for other in others
        )
        cells = (layout, f"{rate[:-4]} Gbit/s", bits, spread(others[0], 0), spread(ours, 0), *ratios)
        yield f"| {' | '.join(cells)} |"


def step(cluster: Cluster, hostfile: Path, script: Path, backend: str, bits: str) -> float:
    command = [sys.executable, "-m", "cpulaunch", "run", "-f", hostfile, "--threads", "1", "--oversubscribe"]
    options = ["--precision", "fp32", "--backend", backend, "--compress-gradients", COMPRESSION[bits]]
    done = cluster.run("node0", [*command, *options, script], timeout=TIMEOUT, directory=script.parent)
    found = re.search(r"ms ([\d.]+)", done.stdout)
    if not found:
        raise RuntimeError(f"{backend}, {bits}: {done.stderr}")
    return float(found[1])


def backends() -> tuple[str, ...]:
    """Return the contenders that can be used here."""
    from cpulaunch.ccl.installed import state

    return ("gloo", "ccl") if state().built else ("gloo",)


# --- collectives


def collectives(cluster: Cluster, options: argparse.Namespace) -> int:
    """Measure the contenders in turn, and print a table for each operation; return 1 if one failed."""
    samples: list[Sample] = []
    failed = 0
    for number in range(options.rounds):
        for operation, layout in cases(options):
            case = Case(operation, layout, options.pin, options.over)
            for together in processes(options.over):
                try:
                    samples += measure(cluster, case, together, options.sizes, number)
                except RuntimeError as error:  # the other results are still useful
                    print(f"{case}, {', '.join(together)}: {error}", file=sys.stderr, flush=True)
                    failed = 1
            if options.json:
                options.json.write_text(json.dumps([sample._asdict() for sample in samples], indent=1))
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    for operation in dict.fromkeys(sample.operation for sample in samples):
        print(table([sample for sample in samples if sample.operation == operation]))
    return failed


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield operations and layouts; send_recv is to the last rank, and to rank 1 if that is another rank."""
    for operation in options.operations:
        for end in (":last", ":1") if operation == "send_recv" else ("",):
            for layout in options.layouts or LAYOUTS["collectives"]:
                if end != ":1" or len(hosts_of(layout)) > 2:
                    yield f"{operation}{end}", layout


def processes(over: str) -> Iterable[dict[str, Contender]]:
    """Return the contenders that can be used here, grouped by the processes that they share."""
    shared: dict[tuple[tuple[str, str], ...], dict[str, Contender]] = {}
    for name, contender in CONTENDERS[over].items():
        if contender.backend in backends():
            shared.setdefault(tuple(contender.variables.items()), {})[name] = contender
    return shared.values()


def measure(
    cluster: Cluster, case: Case, contenders: Mapping[str, Contender], sizes: Iterable[int], number: int
) -> Iterator[Sample]:
    """Run the ranks of contenders that share processes, for all sizes."""
    arguments = {name: contender.argument(case.pin) for name, contender in contenders.items()}
    argv = [sys.executable, str(RANK), case.operation, ",".join(arguments.values()), *map(str, sizes)]
    variables = next(iter(contenders.values())).variables
    with started_ranks(cluster, hosts_of(case.layout), argv, TIMEOUT, **variables) as ranks:
        found = answers(ranks)
    for size in sizes:
        for name, argument in arguments.items():
            of_ranks = [each[str(size)][argument] for each in found]
            ms = [max(turn) for turn in zip(*(each["ms"] for each in of_ranks), strict=True)]
            wire = max(each["wire"] for each in of_ranks)
            yield Sample(*case, name, size, number, ms, wire, of_ranks[0]["repetitions"])


def table(samples: list[Sample]) -> str:
    """Return the table of one operation: medians of the rounds, and ratios within the rounds."""
    operation, pin, over = samples[0].operation, samples[0].pin, samples[0].over
    *others, ours = CONTENDERS[over]
    lines = [
        f"\n{operation}, float32, ms, pinned by {PINS[pin]}; ratios min/median/max of the rounds\n",
        f"| layout | bytes | {' | '.join(CONTENDERS[over])} | best other ÷ {ours} "
        f"| wire: {others[0]} | {ours} | least |",
        f"|---|---{'|---' * len(CONTENDERS[over])}|---|---|---|---|",
    ]
    for layout, size in dict.fromkeys((sample.layout, sample.size) for sample in samples):
        here = [sample for sample in samples if (sample.layout, sample.size) == (layout, size)]
        of = {name: {each.round: each for each in here if each.contender == name} for name in (*others, ours)}
        # A round in which a contender failed has no ratio.
        complete = sorted(set.intersection(*map(set, of.values())))
        ratios = [ratio([of[name][r].ms for name in others], of[ours][r].ms) for r in complete]
        wires = ([each.wire for each in of[name].values()] for name in (others[0], ours))
        cells = [
            layout, f"{size:,}",
            *(median(chain.from_iterable(each.ms for each in by.values())) for by in of.values()),
            spread(ratios) if ratios else "–", *map(median, wires),
            f"{least_wire(operation, hosts_of(layout)):.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio(others: Iterable[Sequence[float]], ours: Sequence[float]) -> float:
    """Return the median over the turns of: time of the fastest other contender ÷ time of ccl."""
    fastest = map(min, zip(*others, strict=True))
    return statistics.median(theirs / mine for theirs, mine in zip(fastest, ours, strict=True))


def median(values: Iterable[float]) -> str:
    """Return a number with three digits, or "–" for none."""
    if not (each := list(values)):
        return "–"
    middle = statistics.median(each)
    return f"{middle:.{3 if middle < 1 else 2 if middle < 10 else 1 if middle < 100 else 0}f}"


def spread(values: list[float], digits: int = 2) -> str:
    return " / ".join(f"{f(values):.{digits}f}" for f in (min, statistics.median, max))


if __name__ == "__main__":
    sys.exit(main())
