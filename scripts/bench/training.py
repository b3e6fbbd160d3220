"""Compares training steps of the same model by different stacks on this machine.

    python scripts/bench/training.py --intel VENV/bin [--rounds 3] [--models bert resnet gpt2] [--out FILE]
    python scripts/bench/training.py --report [--out FILE]       # the tables of the measured rounds
    python scripts/bench/training.py --profile [--models bert]   # where the time of (e) goes, by operation
    python scripts/bench/training.py --defaults [--rounds 3]     # unmodified scripts, with default settings

Stacks: (a) torchrun as a user types it; (b) torchrun with bf16 autocast and fused AdamW, unpinned;
(c) `accelerate launch --cpu` with bf16, and (c mpi) the same script under mpiexec; (d) IPEX and AdamW as
Intel's documentation writes it, on ccl; (e) `cpulaunch.prepare`, native; (f) the same with IPEX; (g) as (e),
one rank alone on one core; (t) as (g), by torch alone; (e bf16) as (e), gradients compressed; (n) and (n1) as
(e) and (g) with the torch of (d) and (f); (i) as (f), one rank alone (runtime/change/engines/ipex.py holds a
step of (i) ÷ (n1)).
(d), (f), (n), (n1), (i) need `--intel` (default $CPULAUNCH_TEST_INTEL), the bin of a venv with torch 2.8,
IPEX 2.8, transformers and scikit-learn.

`--defaults` runs one plain DDP script per model: by `cpulaunch run` without an option, by torchrun as a user
types it, and by torchrun with the fused optimizer, in fp32 and in bf16; on this CPU, without AMX, and with
AVX2 alone (LIMITS).

Each run adds its rounds to FILE (training.json).  Stacks take turns, so that a busy machine affects all of
them; ratios are of one round.  Draws a PNG beside FILE if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent
LIMIT = 170.0  # seconds for one stack
WARM = 3  # steps that don't count
MODELS = ("bert", "resnet", "gpt2", "mlp")
BATCH = {"bert": 8, "resnet": 32, "gpt2": 4, "mlp": 512}  # per rank
SHAPES = {
    "bert": "BERT, 4 layers of 768, 8 x 128 tokens per rank",
    "resnet": "ResNet-50, 32 images of 64 x 64 per rank",
    "gpt2": "GPT-2, 4 layers of 768, 4 x 128 tokens per rank",
    "mlp": "MLP, 4 layers of 1024, 512 rows per rank",
}
LIMITS: dict[str, dict[str, str]] = {
    "this CPU": {},
    "AVX-512 without AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""Variables with which libraries behave as on an older CPU."""


@dataclass(frozen=True)
class Stack:
    """The launcher of ranks, and the program: one of plain, fused32, fused, accelerate, ipex, ours."""

    key: str
    label: str
    way: str
    start: str  # torchrun, accelerate, mpiexec, or cpulaunch
    ranks: int = 2
    options: tuple[str, ...] = ()
    intel: bool = False


STACKS = (
    Stack("a", "torchrun as typed", "plain", "torchrun"),
    Stack("b", "torchrun, bf16, fused AdamW", "fused", "torchrun"),
    Stack("c", "accelerate launch --cpu, bf16", "accelerate", "accelerate"),
    Stack("c mpi", "the same under mpiexec", "accelerate", "mpiexec"),
    Stack("d", "IPEX + AdamW, ccl", "ipex", "cpulaunch", options=("--as-written",), intel=True),
    Stack("e", "cpulaunch, native", "ours", "cpulaunch", options=("--engine", "native")),
    Stack("f", "cpulaunch, IPEX", "ours", "cpulaunch", options=("--engine", "ipex"), intel=True),
    Stack("g", "one rank alone", "ours", "cpulaunch", 1, ("--engine", "native")),
    Stack("t", "one rank alone, torch's operations", "ours", "cpulaunch", 1, ("--engine", "torch")),
    Stack("e bf16", "cpulaunch, native, compressed", "ours", "cpulaunch",
          options=("--engine", "native", "--compress-gradients", "bf16")),
    Stack("n", "native, torch 2.8", "ours", "cpulaunch", options=("--engine", "native"), intel=True),
    Stack("n1", "one rank alone, torch 2.8", "ours", "cpulaunch", 1, ("--engine", "native"), True),
    Stack("i", "one rank alone, IPEX", "ours", "cpulaunch", 1, ("--engine", "ipex"), True),
)  # fmt: skip
DEFAULTS = (
    Stack("default", "cpulaunch run", "plain", "cpulaunch"),
    Stack("typed", "torchrun as typed", "plain", "torchrun"),
    Stack("fp32", "torchrun, fp32, fused AdamW", "fused32", "torchrun"),
    Stack("bf16", "torchrun, bf16, fused AdamW", "fused", "torchrun"),
)
HEAD = "| | stack | rounds | samples/s: median (min to max) | ÷ (a) |"
RATIOS = (  # label, two stacks whose speeds are compared, and the factor for the second speed
    ("e ÷ a", "e", "a", 1),
    ("e ÷ b", "e", "b", 1),
    ("e ÷ 2g", "e", "g", 2),
    ("g ÷ t", "g", "t", 1),
    ("e ÷ d", "e", "d", 1),
    ("f ÷ d", "f", "d", 1),
    ("e bf16 ÷ e", "e bf16", "e", 1),
    ("f ÷ n", "f", "n", 1),
    ("i ÷ n1", "i", "n1", 1),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="that count")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--limits", nargs="+", choices=list(LIMITS), default=list(LIMITS), metavar="LIMIT")
    parser.add_argument("--stacks", nargs="+", choices=[s.key for s in STACKS], metavar="KEY")
    parser.add_argument("--intel", type=Path, default=os.environ.get("CPULAUNCH_TEST_INTEL"), metavar="BIN")
    parser.add_argument("--out", type=Path, default=Path("training.json"))
    parser.add_argument("--report", action="store_true", help="only show what was measured")
    parser.add_argument("--profile", action="store_true", help="show what (e) spends its time on")
    parser.add_argument("--defaults", action="store_true", help="unmodified scripts beside torchrun")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # in a rank
    options = parser.parse_args()
    if options.way:
        return run_rank(options.way, options.models[0], options.steps, options.profile)
    if options.profile:
        (stack,) = (s for s in STACKS if s.key == "e")
        for model in options.models:
            result = run(stack, model, options) or {"profile": []}
            print(f"\n{SHAPES[model]}\n\n| operation | % of the step |\n|---|---|")
            for name, share in result["profile"]:
                print(f"| `{name}` | {share:.1f} |")
        return 0
    if options.defaults:
        compare_defaults(options)
        return 0
    rounds = json.loads(options.out.read_text()) if options.out.exists() else []
    if not options.report:
        stacks = [s for s in STACKS if options.stacks is None or s.key in options.stacks]
        for _ in range(options.rounds):
            for model in options.models:
                measured = {s.key: run(s, model, options) for s in stacks if options.intel or not s.intel}
                rounds.append({"model": model, "stacks": measured})
                options.out.write_text(json.dumps(rounds, indent=1) + "\n")
    print(report(rounds))
    draw(rounds, options.out.with_suffix(".png"))
    return 0


def compare_defaults(options: argparse.Namespace) -> None:
    """Print samples/s by model and limit, and the default's ratio to the better torchrun of each round."""
    print(cpu_name())
    heads = [f"{stack.label}" for stack in DEFAULTS]
    print(f"| limit | model | {' | '.join(heads)} | ÷ the better fused torchrun | ÷ torchrun as typed |")
    print("|---" * (len(heads) + 4) + "|", flush=True)
    for limit in options.limits:
        for model in options.models:
            stacks, rounds = list(DEFAULTS), []
            for _ in range(options.rounds):
                measured = {stack.key: run(stack, model, options, LIMITS[limit]) for stack in stacks}
                # A stack that took too long, for example with emulated bf16, is not run again.
                stacks = [stack for stack in stacks if measured[stack.key]]
                rounds.append({key: each["samples_per_second"] for key, each in measured.items() if each})
            speeds = {each.key: [one[each.key] for one in rounds if each.key in one] for each in DEFAULTS}
            ratios = [one["default"] / max(one.get("fp32", 0), one.get("bf16", 0)) for one in rounds]
            typed = [one["default"] / one["typed"] for one in rounds if "typed" in one]
            shown = [spread(each, 1) if each else f"none in {LIMIT:.0f} s" for each in speeds.values()]
            shown += [spread(each, 2) if each else "–" for each in (ratios, typed)]
            print(f"| {limit} | {SHAPES[model].partition(',')[0]} | {' | '.join(shown)} |", flush=True)


def cpu_name() -> str:
    """Return the CPU's model, and its flags that matter here."""
    text = Path("/proc/cpuinfo").read_text()
    name = next((line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")), "?")
    flags = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in text.split()]
    return f"{name}: {' '.join(flags)}"


def run(
    stack: Stack, model: str, options: argparse.Namespace, limits: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Return the measurements of rank 0 of ``stack``; None if it failed."""
    binaries = Path(options.intel) if stack.intel else Path(sys.executable).parent
    script = [
        str(Path(__file__).resolve()),
        "--way",
        stack.way,
        "--models",
        model,
        "--steps",
        str(options.steps),
        *(["--profile"] if options.profile else []),
    ]
    ranks = str(stack.ranks)
    start = {
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", ranks],
        "accelerate": ["accelerate", "launch", "--cpu", "--num_processes", ranks, "--num_machines", "1",
                       "--mixed_precision", "bf16", "--dynamo_backend", "no"],
        "mpiexec": ["mpiexec.hydra", "-n", ranks, "python"],
        "cpulaunch": ["cpulaunch", "run", "-n", ranks, *stack.options],
    }[stack.start]  # fmt: skip
    if stack.start == "cpulaunch" and stack.ranks == 1:
        start += ["--cores", str(min(os.sched_getaffinity(0)))]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("CPULAUNCH_", "OMP_", "CCL_", "FI_"))},
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        **(limits or {}),
    }
    if stack.start == "mpiexec":
        environment |= {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "true"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [str(binaries / start[0]), *start[1:], *script], cwd=directory, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            out, err = "", f"no result within {LIMIT:.0f} s"
        finally:
            process.kill()
            process.wait()
        utilization = mfu(Path(directory))
    found = [line.partition("MEASURED ")[2] for line in out.splitlines() if "MEASURED " in line]
    if not found:
        print(f"({stack.key}) {model} failed:\n{err[-2000:]}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(found[0]) | {"mfu": utilization}
    print(f"({stack.key}) {model}: {result['samples_per_second']:.1f} samples/s", file=sys.stderr, flush=True)
    return result


def mfu(directory: Path) -> float | None:
    """Return the MFU of the median step after the warm-up, from the telemetry of the job in ``directory``."""
    file = next(directory.glob("runs/*/telemetry.jsonl"), None)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file else [{}]
    work, peak = rows[0].get("flops_per_step"), rows[0].get("peak_flops")
    seconds = [row["seconds"] for row in rows if row.get("rank") == 0 and row.get("step", 0) > WARM + 1]
    if not (work and peak and seconds):
        return None
    return float(work / peak / statistics.median(seconds))


# --- in a rank


def run_rank(way: str, name: str, steps: int, profile: bool) -> int:
    import torch

    torch.manual_seed(0)
    model, batch = make(name)
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=1e-4, **({"fused": True} if way.startswith("fused") else {})
    )
    context: Any = contextlib.nullcontext
    backward: Any = torch.Tensor.backward
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if way == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
        rank, size = accelerator.process_index, accelerator.num_processes
    elif way == "ours":
        import cpulaunch

        model, optimizer = cpulaunch.prepare(model, optimizer)
        context = cpulaunch.autocast
    else:
        torch.distributed.init_process_group("ccl" if way == "ipex" else "gloo")
        if way == "ipex":
            import intel_extension_for_pytorch

            model, optimizer = intel_extension_for_pytorch.optimize(
                model, optimizer=optimizer, dtype=torch.bfloat16
            )
        model = torch.nn.parallel.DistributedDataParallel(model)
        if way in ("fused", "ipex"):
            context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731

    def step(synchronise: bool = True) -> tuple[float, float]:
        """Return the seconds of the step, and of the optimizer's part."""
        began = time.perf_counter()
        with contextlib.nullcontext() if synchronise else model.no_sync():
            with context():
                loss = loss_of(name, model, batch)
            optimizer.zero_grad()
            backward(loss)
        middle = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - began, time.perf_counter() - middle

    for _ in range(WARM):
        step()
    times = [step() for _ in range(steps)]
    seconds = statistics.median(total for total, _ in times)
    result = {
        "samples_per_second": BATCH[name] * size / seconds,
        "step_ms": 1e3 * seconds,
        "optimizer_ms": 1e3 * statistics.median(part for _, part in times),
        "backend": torch.distributed.get_backend_config() if torch.distributed.is_initialized() else None,
        "torch": torch.__version__,
    }
    if way == "ours" and size > 1:
        alone = [step(synchronise=False)[0] for _ in range(max(3, steps // 2))]
        result["step_without_communication_ms"] = 1e3 * statistics.median(alone)
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                step()
        events = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)
        whole = sum(event.self_cpu_time_total for event in events)
        result["profile"] = [(e.key, 100 * e.self_cpu_time_total / whole) for e in events[:14]]
    if rank == 0:
        print("MEASURED " + json.dumps(result), flush=True)
    return 0


def make(name: str) -> tuple[Any, Any]:
    """Return a model and a batch of BATCH[name] samples."""
    import torch

    if name == "resnet":
        specification = importlib.util.spec_from_file_location(
            "example", REPOSITORY / "examples" / "resnet_channels_last.py"
        )
        assert specification is not None
        assert specification.loader is not None
        example = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(example)
        return example.ResNet50(), (torch.randn(BATCH[name], 3, 64, 64), torch.randint(1000, (BATCH[name],)))
    if name == "mlp":
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
        labels = torch.randint(1024, (BATCH[name],))
        return torch.nn.Sequential(*layers), (torch.randn(BATCH[name], 1024), labels)
    import transformers

    tokens = torch.randint(30000, (BATCH[name], 128))
    if name == "bert":
        config = transformers.BertConfig(num_hidden_layers=4)
        return transformers.BertForSequenceClassification(config), (tokens, torch.randint(2, (BATCH[name],)))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4)), (tokens, tokens)


def loss_of(name: str, model: Any, batch: Any) -> Any:
    import torch

    inputs, labels = batch
    if name in ("resnet", "mlp"):
        return torch.nn.functional.cross_entropy(model(inputs), labels)
    return model(input_ids=inputs, labels=labels).loss


# --- results


def report(rounds: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for name in MODELS:
        mine = [entry["stacks"] for entry in rounds if entry["model"] == name]
        if not mine:
            continue
        lines += [
            "",
            SHAPES[name],
            "",
            HEAD,
            "|---" * 5 + "|",
        ]
        for stack in STACKS:
            speeds = list(values(mine, stack.key))
            if speeds:
                against = [one / base for one, base in pairs(mine, stack.key, "a")]
                shown = f"{statistics.median(against):.2f}" if against else "–"
                lines.append(
                    f"| {stack.key} | {stack.label} | {len(speeds)} | {spread(speeds, 1)} | {shown} |"
                )
        lines += ["", "| ratio | median (min to max), per round |", "|---|---|"]
        for label, one, other, factor in RATIOS:
            ratios = [a / (factor * b) for a, b in pairs(mine, one, other)]
            if ratios:
                lines.append(f"| {label} | {spread(ratios, 2)} |")
        for key in ("g", "t"):
            if shares := [one[key]["mfu"] for one in mine if one.get(key) and one[key].get("mfu")]:
                lines.append(f"| MFU of {key} | {spread(shares, 2)} |")
        lines += parts(mine)
    return "\n".join(lines)


def parts(mine: list[dict[str, Any]]) -> Iterator[str]:
    """Print the parts of a step of (e), (f), in ms, as the minimum of all rounds."""
    yield from (
        "",
        "| step | ms | optimizer | forward, backward | DDP and communication |",
        "|---|---|---|---|---|",
    )
    for key in ("e", "f", "g"):
        found = [entry[key] for entry in mine if entry.get(key)]
        if not found:
            continue
        total = min(one["step_ms"] for one in found)
        step = min(one["optimizer_ms"] for one in found)
        alone = min(one.get("step_without_communication_ms", one["step_ms"]) for one in found)
        yield f"| {key} | {total:.0f} | {step:.0f} | {alone - step:.0f} | {total - alone:.0f} |"


def values(mine: list[dict[str, Any]], key: str) -> Iterator[float]:
    for entry in mine:
        if entry.get(key):
            yield entry[key]["samples_per_second"]


def pairs(mine: list[dict[str, Any]], one: str, other: str) -> Iterator[tuple[float, float]]:
    for entry in mine:
        if entry.get(one) and entry.get(other):
            yield entry[one]["samples_per_second"], entry[other]["samples_per_second"]


def spread(numbers: list[float], digits: int) -> str:
    middle = f"{statistics.median(numbers):.{digits}f}"
    return f"{middle} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


def draw(rounds: list[dict[str, Any]], path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no {path.name}: matplotlib is not installed", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in MODELS if any(entry["model"] == name for entry in rounds)]
    size = 3 + 3.5 * len(names), 4  # inches
    figure, axes = pyplot.subplots(1, len(names), figsize=size, squeeze=False, sharey=True)
    for axis, name in zip(axes[0], names, strict=True):
        mine = [entry["stacks"] for entry in rounds if entry["model"] == name]
        shown = [stack for stack in STACKS if stack.ranks == 2 and list(values(mine, stack.key))]
        heights = [statistics.median(values(mine, stack.key)) for stack in shown]
        colours = ["C0" if stack.way == "ours" else "0.7" for stack in shown]
        bars = axis.barh([f"({stack.key}) {stack.label}" for stack in shown], heights, color=colours)
        axis.bar_label(bars, fmt="%.1f", padding=2)
        axis.margins(x=0.2)  # room for the labels
        axis.invert_yaxis()
        axis.set_title(SHAPES[name].replace(", ", "\n", 1), fontsize=9)
        axis.set_xlabel("samples/s, 2 ranks on 1 core each")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
