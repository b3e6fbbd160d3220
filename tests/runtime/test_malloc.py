"""Training keeps freed memory from step to step, and needs hardly more memory."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from support.command import Run
from support.jobs import output_of_one
from support.marks import repeat

from cpulaunch.discovery.host.this_host import libc_here

pytestmark = pytest.mark.slow

TRAIN = """
import json, os, resource
import torch
from transformers import BertConfig, BertForMaskedLM

torch.manual_seed(0)
model = BertForMaskedLM(BertConfig(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024))
x = torch.randint(0, 30522, (4, 128))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
faults = []
for _ in range(9):
    optimizer.zero_grad()
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    used = resource.getrusage(resource.RUSAGE_SELF)
    faults.append(used.ru_minflt)
steps = [b - a for a, b in zip(faults, faults[1:])]
print(json.dumps({"tunables": os.environ.get("GLIBC_TUNABLES", ""), "faults": steps, "peak": used.ru_maxrss}))
"""


def trained(cpulaunch: Run, allocator: str) -> dict[str, Any]:
    options = ["--allocator", allocator, "--backend", "gloo", "--precision", "fp32", "--threads", "1"]
    result: dict[str, Any] = output_of_one(cpulaunch("run", "-n", "1", *options, "train.py", timeout=180))
    return result


@pytest.mark.parametrize("allocator", ["auto", repeat("glibc")])
def test_a_step_of_bert_causes_less_than_a_thousand_page_faults(
    cpulaunch: Run, tmp_path: Path, allocator: str
) -> None:
    if not libc_here().startswith("glibc"):
        pytest.skip("the C library is not glibc")
    (tmp_path / "train.py").write_text(TRAIN)
    plain, tuned = trained(cpulaunch, "default"), trained(cpulaunch, allocator)
    assert typical(plain) > 1000 > typical(tuned)
    if tuned["tunables"]:  # empty if auto has chosen tcmalloc
        assert tuned["peak"] <= 1.1 * plain["peak"]


def typical(result: dict[str, Any]) -> float:
    """Return the typical page faults of a step.  The first steps, in which the heap grows, don't count."""
    return statistics.median(result["faults"][3:])
