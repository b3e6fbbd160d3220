"""Training keeps freed memory from step to step, and needs hardly more memory."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from support.command import Run
from support.jobs import output_of_one
from support.marks import repeat

from cpulaunch.discovery.host.this_host import libc_here

pytestmark = pytest.mark.slow

# Each model trains in a child of its own, so that one import serves three.
TRAIN = """
import json, os, resource, sys
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self, before, channels, stride):
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels))
        self.short = nn.Conv2d(before, channels, 1, stride, bias=False)
    def forward(self, x):
        return torch.relu(self.way(x) + self.short(x))

def bert():
    model = BertForMaskedLM(BertConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024))
    x = torch.randint(0, 30522, (4, 128))
    return model, lambda: model(input_ids=x, labels=x).loss

def gpt2():
    model = GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=4, n_head=8))
    x = torch.randint(0, 50257, (2, 128))
    return model, lambda: model(input_ids=x, labels=x).loss

def resnet():
    widths = (64, 64, 128, 256, 512)
    blocks = [Block(a, b, 1 + (b > 64)) for a, b in zip(widths, widths[1:])]
    model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    x, y = torch.randn(8, 3, 160, 160), torch.randint(0, 1000, (8,))
    return model, lambda: nn.functional.cross_entropy(model(x), y)

def train(make):
    model, loss = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    faults = []
    for _ in range(9):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        used = resource.getrusage(resource.RUSAGE_SELF)
        faults.append(used.ru_minflt)
    return {"faults": [b - a for a, b in zip(faults, faults[1:])], "peak": used.ru_maxrss}

seen = {"tunables": os.environ.get("GLIBC_TUNABLES", "")}
for make in map(globals().get, sys.argv[1:]):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, json.dumps(train(make)).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    seen[make.__name__] = json.loads(os.read(read, 10000))
print(json.dumps(seen))
"""


def trained(cpulaunch: Run, directory: Path, allocator: str, models: tuple[str, ...]) -> dict[str, Any]:
    (directory / "train.py").write_text(TRAIN)
    options = ["--allocator", allocator, "--backend", "gloo", "--precision", "fp32", "--threads", "1"]
    seen: dict[str, Any] = output_of_one(
        cpulaunch("run", "-n", "1", *options, "train.py", *models, timeout=180)
    )
    print(allocator, json.dumps(seen))
    return seen


@pytest.mark.parametrize(
    ("models", "allocators"),
    [(("bert",), ("auto",)), repeat(("bert", "gpt2", "resnet"), ("glibc", "auto"))],
    ids=["bert", "all"],
)
def test_a_step_of_a_model_takes_less_than_a_thousand_page_faults(
    cpulaunch: Run, tmp_path: Path, models: tuple[str, ...], allocators: tuple[str, ...]
) -> None:
    if not libc_here().startswith("glibc"):
        pytest.skip("the C library is not glibc")
    plain = trained(cpulaunch, tmp_path, "default", models)
    assert min(typical(plain[model]) for model in models) > 1000
    for allocator in allocators:
        tuned = trained(cpulaunch, tmp_path, allocator, models)
        assert {model: typical(tuned[model]) < 1000 for model in models} == dict.fromkeys(models, True)
        if tuned["tunables"]:  # otherwise, auto chose tcmalloc, which needs up to 11 % more for this GPT-2
            growth = {model: tuned[model]["peak"] / plain[model]["peak"] for model in models}
            assert max(growth.values()) <= 1.1, growth


def typical(seen: dict[str, Any]) -> float:
    """The page faults of a step, after the first steps, in which the heap grows."""
    return statistics.median(seen["faults"][3:])
