"""The jobs that use the kernels, their message, and jobs without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.command import Run
from support.marks import repeat

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)

class Attend(nn.Module):
    def forward(self, x):
        heads = x.view(4, 16, 2, 20).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return x + y.transpose(1, 2).reshape(64, 40)

model = nn.Sequential(nn.Linear(30, 40), nn.Dropout(0.5), Attend(), nn.Linear(40, 3))
if "ddp" in sys.argv:
    torch.distributed.init_process_group()
    model = nn.parallel.DistributedDataParallel(model)
if "fsdp" in sys.argv:
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group()
    for layer in (model[0], model[3], model):
        fully_shard(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 30)
losses = []
for _ in range(40):
    loss = (model(x) - x[:, :3]).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0]
print("trained")
"""
LINE = "dropout and attention with dropout by cpulaunch's kernels ("


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_job_reports_replaced_kernels_at_its_first_step(cpulaunch: Run, script: Path) -> None:
    done = cpulaunch("run", "-n", "1", "--precision", "fp32", script)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if LINE in line]
    assert "changed in this script: " in line
    assert "SGD uses its fused implementation" in line
    assert "overriding" not in done.stderr.lower()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", repeat("fsdp")])
def test_parallel_training_uses_the_kernels(cpulaunch: Run, script: Path, way: str) -> None:
    done = cpulaunch("run", "-n", "2", "--oversubscribe", "--precision", "fp32", script, way)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
    assert LINE in done.stderr


@pytest.mark.parametrize(
    "options", [("--engine", "torch"), repeat(("--engine", "ipex")), repeat(("--as-written",))], ids=" ".join
)
def test_other_engines_do_not_use_the_kernels(cpulaunch: Run, script: Path, options: tuple[str, ...]) -> None:
    done = cpulaunch("run", "-n", "1", "--precision", "fp32", *options, script)
    assert done.returncode == 0, done.stderr
    assert "kernels" not in done.stderr


def test_without_a_compiler_torch_trains_alone_and_a_line_reports_it(
    cpulaunch: Run, script: Path, tmp_path: Path
) -> None:
    done = cpulaunch(
        "run", "-n", "1", "--backend", "gloo", "--precision", "fp32", script,
        env={"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "kernels" in line]
    assert "training steps use torch alone, without cpulaunch's kernels: no C++ compiler" in line


def test_the_next_run_does_not_retry_a_failed_compiler(cpulaunch: Run, script: Path, tmp_path: Path) -> None:
    (count := tmp_path / "count").write_text("")
    (compiler := tmp_path / "failing-g++").write_text(
        f'#!/bin/sh\ncase "$*" in *-dumpversion*) echo 99; exit;; esac\necho x >> {count}\n'
        "echo 'kernels.cpp:1: error: no such thing' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def said(*words: str) -> tuple[str, int]:
        """Run a job; return its line about kernels, and how often the compiler has run so far."""
        done = cpulaunch(*words, env=environment)
        text = next(line for line in done.stderr.splitlines() if "compiler failed" in line)
        return text, len(count.read_text().splitlines())

    run = ("run", "-n", "1", "--backend", "gloo", "--precision", "fp32", str(script))
    _, tried = said(*run)
    assert tried > 0
    line, then = said(*run)
    assert then == tried
    assert "error: no such thing (an earlier run tried it; `cpulaunch ccl build` tries again)" in line
    _, again = said("ccl", "build")
    assert again > tried


def test_importing_ipex_turns_the_kernels_off(tmp_path: Path) -> None:
    (tmp_path / "intel_extension_for_pytorch.py").write_text("")
    program = (
        "import sys, types, torch; from torch.nn import functional\n"
        "from cpulaunch.runtime.change import kernels\n"
        "own = functional.dropout; kernels.enable(); assert functional.dropout is not own\n"
        "import intel_extension_for_pytorch\n"
        "assert functional.dropout is own; kernels.enable(); assert functional.dropout is own\n"
    )
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
