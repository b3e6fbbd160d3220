"""Compares the final losses of small models trained by the engines native and torch.

    python scripts/bench/convergence.py [--models bert resnet] [--steps 300] [--seeds 5] [--precision bf16]

The models are a BERT (masked bytes of text), a GPT-2 (next bytes) and a ResNet (scikit-learn's images of
digits), with dropout and AdamW.  The text is Python's documentation.  From each seed, each engine trains
each model, on one rank with one core; the two engines run at the same time.

A final loss is the mean of the last 50 steps, or of the last sixth of the steps if that is fewer.  The
table has mean ± standard deviation over the seeds, and the difference of the means ÷ the standard deviation
of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = ("bert", "gpt2", "resnet")
ENGINES = ("native", "torch")
LIMIT = 600.0  # seconds for one model and engine
LENGTH, TEXTS, IMAGES = 64, 16, 32  # bytes of a text; texts and images of a step
MASK = 256  # the token of masked bytes, in addition to the 256 bytes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--train", choices=MODELS, help=argparse.SUPPRESS)  # in a rank
    options = parser.parse_args()
    if options.train:
        losses = [train(options.train, seed, options.steps) for seed in range(options.seeds)]
        print("LOSSES " + json.dumps(losses), flush=True)
        return 0
    print("| model | native | torch | difference | ÷ torch's deviation |\n|---|---|---|---|---|", flush=True)
    for model in options.models:
        with tempfile.TemporaryDirectory() as directory:
            losses = compare(model, options, Path(directory))
        print(row(model, losses), flush=True)
    return 0


def compare(model: str, options: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    """Train with both engines at once, each on its own core if there are two; return the losses of each."""
    cores = sorted(os.sched_getaffinity(0))
    running = {}
    for index, engine in enumerate(ENGINES):
        program = [str(Path(__file__).resolve()), "--train", model]
        program += ["--steps", str(options.steps), "--seeds", str(options.seeds)]
        command = [str(Path(sys.executable).parent / "cpulaunch"), "run", "-n", "1", "--engine", engine]
        command += ["--precision", options.precision, "--cores", str(cores[index % len(cores)])]
        running[engine] = subprocess.Popen(
            [*command, *program], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("OMP_")} | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    try:
        return {engine: losses_of(engine, process) for engine, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def losses_of(engine: str, process: subprocess.Popen[str]) -> list[float]:
    """Wait for a run; return its losses.  Raises SystemExit if it failed or used another engine."""
    out, error = process.communicate(timeout=LIMIT)
    found = [line.partition("LOSSES ")[2] for line in out.splitlines() if "LOSSES " in line]
    if process.returncode != 0 or not found or ("by cpulaunch's kernels" in error) != (engine == "native"):
        raise SystemExit(f"{engine} failed, or computed by other kernels than it should:\n{error[-2000:]}")
    losses: list[float] = json.loads(found[0])
    return losses


def row(model: str, losses: dict[str, list[float]]) -> str:
    means = {engine: statistics.mean(each) for engine, each in losses.items()}
    spread = {engine: statistics.stdev(each) for engine, each in losses.items()}
    shown = [f"{means[engine]:.4f} ± {spread[engine]:.4f}" for engine in ENGINES]
    difference = means["native"] - means["torch"]
    return f"| {model} | {' | '.join(shown)} | {difference:+.4f} | {difference / spread['torch']:+.2f} |"


# --- in a rank


def train(name: str, seed: int, steps: int) -> float:
    """Train a model from a seed; return its final loss."""
    import torch

    import cpulaunch

    torch.manual_seed(seed)
    model, batch_of = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = cpulaunch.prepare(model, optimizer)
    data = torch.Generator().manual_seed(seed)  # separate, as engines draw different numbers for masks
    losses = []
    for _ in range(steps):
        inputs, labels = batch_of(data)
        with cpulaunch.autocast():
            output = model(inputs)
            logits = output if name == "resnet" else output.logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses[-min(50, max(1, steps // 6)) :])


def make(name: str) -> tuple[Any, Any]:
    """Return a model, and a function that draws a batch: inputs, and a label for each row of logits."""
    if name == "resnet":
        return make_resnet(), images()
    import transformers

    if name == "bert":
        shape = {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 512,
        }
        config = transformers.BertConfig(vocab_size=MASK + 1, max_position_embeddings=LENGTH, **shape)
        return transformers.BertForMaskedLM(config), texts(masked=True)
    config = transformers.GPT2Config(vocab_size=MASK + 1, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config), texts(masked=False)


def texts(masked: bool) -> Any:
    import pydoc_data.topics

    import torch

    whole = "\n".join(pydoc_data.topics.topics.values()).encode()
    corpus = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()

    def batch(data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(corpus) - LENGTH, (TEXTS, 1), generator=data)
        rows = corpus[starts + torch.arange(LENGTH + 1)]
        if not masked:
            return rows[:, :-1], rows[:, 1:].flatten()
        inputs, hidden = rows[:, :-1], torch.rand(TEXTS, LENGTH, generator=data) < 0.15
        return inputs.masked_fill(hidden, MASK), inputs.masked_fill(~hidden, -100).flatten()

    return batch


def images() -> Any:
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)

    def batch(data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(labels), (IMAGES,), generator=data)
        return pixels[chosen], labels[chosen]

    return batch


def make_resnet() -> Any:
    """Return a ResNet of three blocks of 32 channels for images of 8 × 8, with dropout before the end."""
    from torch import nn
    from torch.nn.functional import relu

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32),
            )  # fmt: skip

        def forward(self, x: Any) -> Any:
            return relu(x + self.layers(x))

    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 10))
    return nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), *(Block() for _ in range(3)), *head)


if __name__ == "__main__":
    sys.exit(main())
