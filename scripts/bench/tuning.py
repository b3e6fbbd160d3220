"""Compares `cpulaunch tune` with a full grid: the speed of its settings, and the time that it takes.

    python scripts/bench/tuning.py [--models bert resnet] [--share 0.25]

The grid is all combinations of 1 or 2 ranks, pinned or not, bf16 or fp32, and malloc, glibc's tunables or
tcmalloc; each point is run once until its rate is known within 3 %, for at most 45 s.  The tuning starts from
one rank that is not pinned; its budget is a share of the grid's time.  Then the winner of the tuning and the
best point of the grid are run in turn, three times.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SETTINGS
from cpulaunch.tune.search import FINE, Trial
from cpulaunch.tune.table import title
from cpulaunch.tune.trial import Goal, Runner

LIMIT = 120.0  # seconds within which a run must have a rate
ENOUGH = 45.0  # seconds after which a run ends, however much its rate varies

START = "cpulaunch: 1\nhosts: {nproc: 1}\ncpu: {strategy: none}\noutput: {tee: none}\n"

SCRIPT = """
import sys, torch, transformers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class Made(Dataset):
    def __init__(self, *items):
        self.items = items
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        return tuple(item[index % len(item)] for item in self.items)

torch.distributed.init_process_group()
if sys.argv[1] == "bert":
    config = transformers.BertConfig(num_hidden_layers=4)
    model = transformers.BertForSequenceClassification(config)
    data, batch = Made(torch.randint(30_000, (64, 128)), torch.randint(2, (64,))), 8
    loss_of = lambda inputs, labels: ddp(input_ids=inputs, labels=labels).loss
else:
    config = transformers.ResNetConfig(num_labels=10)
    model = transformers.ResNetForImageClassification(config)
    data, batch = Made(torch.randn(64, 3, 64, 64), torch.randint(10, (64,))), 32
    loss_of = lambda inputs, labels: ddp(pixel_values=inputs, labels=labels).loss
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for inputs, labels in DataLoader(data, batch_size=batch, drop_last=True):
    optimizer.zero_grad()
    loss_of(inputs, labels).backward()
    optimizer.step()
"""

GRID: dict[Setting[Any], tuple[Any, ...]] = {
    Config.hosts.nproc: (1, 2),
    Config.cpu.strategy: ("scatter", "none"),
    Config.training.precision: ("bf16", "fp32"),
    Config.cpu.allocator: ("default", "glibc", "tcmalloc"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("bert", "resnet"), default=["bert", "resnet"])
    parser.add_argument("--share", type=float, default=0.25, help="of the grid's time, for the tuning")
    options = parser.parse_args()
    cpu = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    print(f"CPU: {cpu[1] if cpu else 'unknown'}")
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        Path("train.py").write_text(SCRIPT)
        Path("start.yaml").write_text(START)
        for model in options.models:
            compare(model, options.share)
    return 0


def compare(model: str, share: float) -> None:
    print(f"\n{model}")
    runner = Runner(["--config-file=start.yaml"], ["train.py", model], dict(os.environ))
    began = time.monotonic()
    trials = [measure(runner, dict(zip(GRID, values, strict=True))) for values in product(*GRID.values())]
    whole = time.monotonic() - began
    best = max(trials, key=rate_of)
    print(f"grid: {len(trials)} points, {whole:.0f} s; best: {title(best.values)}")
    found, tuning = tune(model, share * whole)
    winner = {SETTINGS[key]: SETTINGS[key].kind.from_yaml(value) for key, value in found.items()}
    print(f"tuning: {tuning:.0f} s, {tuning / whole:.2f} of the grid's; {title(winner)}", flush=True)
    ratios = []
    for _ in range(3):
        ours = rate_of(measure(runner, winner))
        ratios.append(ours / rate_of(measure(runner, best.values)))
    middle = statistics.median(ratios)
    print(f"rate of the winner ÷ best point: {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def tune(model: str, budget: float) -> tuple[dict[str, Any], float]:
    """Return the values that the tuning chose, by the settings' keys, and its time in seconds."""
    began = time.monotonic()
    options = ["--config-file", "start.yaml", f"--budget={budget:.0f}s", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "tune", *options, "-o", f"{model}.yaml", "train.py", model],
        stdout=subprocess.PIPE, text=True, check=True, timeout=3600,
    )  # fmt: skip
    return json.loads(done.stdout)["winner"] or {}, time.monotonic() - began


def measure(runner: Runner, values: dict[Setting[Any], Any]) -> Trial:
    trial = runner.run(values, values.get(Config.hosts.nproc, 1), Goal(FINE, 0.0, ENOUGH, LIMIT))
    print(f"  {rate_of(trial):8.2f}/s in {trial.seconds:3.0f} s  {title(values)} {trial.why}", flush=True)
    return trial


def rate_of(trial: Trial) -> float:
    return trial.rate.per_second if trial.rate else 0.0


if __name__ == "__main__":
    sys.exit(main())
