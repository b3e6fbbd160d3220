"""The rates of matrix products: measured once, cached by CPU, torch and threads, and used by later jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.command import Run, clean_environment

from cpulaunch.discovery.host.rate_cache import Rate, RateCache
from cpulaunch.discovery.host.this_host import cpu_here
from cpulaunch.model.rates import Cpu, ProductRates
from cpulaunch.runtime.product_rates import known_rates, peak, product_rates

SLOW_BF16 = {"fp32": Rate(160e9, 170e9), "bf16": Rate(84e9, 90e9)}
SHOWN = "precision fp32 (bf16 is 1.9 times slower on this CPU, 84 against 160 GFLOP/s)"
SCRIPT = "import os; print('rank', os.environ['RANK'], os.environ['CPULAUNCH_PRECISION'])\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RateCache:
    """An empty cache of rates, for this CPU and torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return RateCache.of(cpu_here(), torch.__version__, {})


def test_rates_are_kept_by_cpu_torch_and_instruction_limits(tmp_path: Path, cache: RateCache) -> None:
    cpu = cpu_here()
    others = [
        RateCache.of(cpu._replace(microcode="0x1234"), torch.__version__, {}),
        RateCache.of(Cpu("AuthenticAMD"), torch.__version__, {}),
        RateCache.of(cpu, "2.99.0", {}),
        *(
            RateCache.of(cpu, torch.__version__, {name: "AVX2"})
            for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
        ),
    ]
    assert len({each.file for each in (cache, *others)}) == 7
    assert RateCache.of(cpu, torch.__version__, {"OTHER": "AVX2"}) == cache


def test_each_number_of_threads_has_its_own_rates(cache: RateCache) -> None:
    cache.keep(1, SLOW_BF16)
    cache.keep(14, {"fp32": Rate(2e12, 2e12)})
    cache.keep(14, {"bf16": Rate(9e12, 9e12)})
    cache.keep(7, {"fp32": Rate(1e12, 1e12)})
    assert cache.product_rates() == (ProductRates(1, 160e9, 84e9), ProductRates(14, 2e12, 9e12))
    assert cache.rate(7, "fp32") == Rate(1e12, 1e12)
    assert cache.rate(7, "bf16") is None


@pytest.mark.parametrize(
    "text", ["broken", "[]", '{"1": 3}', '{"1": {"fp32": {"layer": 1}, "bf16": {"layer": -1}}}']
)
def test_a_broken_cache_counts_as_empty(cache: RateCache, text: str) -> None:
    cache.keep(2, SLOW_BF16)
    cache.file.write_text(text)
    assert cache.product_rates() == ()
    assert cache.rate(1, "fp32") is None


def test_an_unwritable_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache = RateCache.of(cpu_here(), torch.__version__, {})
    cache.keep(1, SLOW_BF16)
    with cache.locked():
        assert cache.product_rates() == ()


def test_known_rates_are_not_measured_again(cache: RateCache) -> None:
    threads = torch.get_num_threads()
    cache.keep(threads, {**SLOW_BF16, "fp64": Rate(1.0, 2.0)})
    assert product_rates(torch) == ProductRates(threads, 160e9, 84e9)
    assert (peak(torch, "fp32"), peak(torch, "fp64")) == (170e9, 2.0)


def test_a_missing_precision_is_measured(cache: RateCache) -> None:
    cache.keep(torch.get_num_threads(), SLOW_BF16)
    rate = known_rates(torch, ("fp64",))["fp64"]
    assert 1e8 < rate.layer <= rate.best < 1e14


def own_cache(directory: Path) -> dict[str, str]:
    """The environment for a cache below ``directory``, without compiling kernels into it."""
    return {"XDG_CACHE_HOME": str(directory / "cache"), "CPULAUNCH_TRAINING_ENGINE": "torch"}


def test_a_job_computes_in_the_faster_precision(cpulaunch: Run, tmp_path: Path, cache: RateCache) -> None:
    cache.keep(1, SLOW_BF16)
    (tmp_path / "script.py").write_text(SCRIPT)
    env = own_cache(tmp_path)
    options = ("-n", 1, "--cores-per-rank", 1, "--backend", "gloo")
    done = cpulaunch("run", *options, "script.py", env=env)
    assert done.stdout == "rank 0 fp32\n"
    assert SHOWN in done.stderr.splitlines()[0]
    (plan,) = tmp_path.glob("runs/*/plan.json")
    measured = json.loads(plan.read_text())["precision"]["measured"]
    assert measured == {"threads": 1, "fp32": 160e9, "bf16": 84e9}
    insisted = cpulaunch("run", *options, "--precision", "bf16", "script.py", env=env)
    assert insisted.stdout == "rank 0 bf16\n"
    assert "precision bf16 is slow here: bf16 is 1.9 times slower on this CPU" in insisted.stderr
    shown = cpulaunch("config", "show", "--set", "hosts.nproc=1", "--set", "cpu.cores_per_rank=1", env=env)
    assert SHOWN in shown.stdout
    dry = cpulaunch("run", *options, "--dry-run", "script.py", env=env)
    assert SHOWN in dry.stdout.splitlines()
    limited = cpulaunch("run", *options, "--dry-run", "script.py", env={**env, "ATEN_CPU_CAPABILITY": "avx2"})
    assert "(not measured; the CPU" in limited.stdout


def test_recorded_facts_hold_the_rates(cpulaunch: Run, tmp_path: Path, cache: RateCache) -> None:
    cache.keep(1, SLOW_BF16)
    env = own_cache(tmp_path)
    assert cpulaunch("hosts", "check", "--facts-out", "facts.json", env=env).returncode == 0
    (tmp_path / "script.py").write_text(SCRIPT)
    dry = cpulaunch("run", "-n", 1, "--cores-per-rank", 1, "--facts", "facts.json", "--dry-run", "script.py")
    assert SHOWN in dry.stdout.splitlines()


@pytest.mark.slow
def test_the_first_job_measures_with_one_line(cpulaunch: Run, tmp_path: Path, cache: RateCache) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = own_cache(tmp_path)
    options = ("-n", 1, "--backend", "gloo")
    done = cpulaunch("run", *options, "script.py", env=env)
    lines = done.stderr.splitlines()
    assert lines[0].startswith("cpulaunch: measuring bf16 and fp32 on this machine")
    assert sum(" GFLOP/s)" in line for line in lines) == 1
    # A program that is not Python is started at once.
    other = cpulaunch("run", *options, "--no-python", "true", env={"XDG_CACHE_HOME": "/none"})
    assert "measuring" not in other.stderr


AGREE = """
import os
os.environ["XDG_CACHE_HOME"] = os.path.join("caches", os.environ["RANK"])
import torch, cpulaunch
torch.set_num_threads(1)
cpulaunch.prepare(torch.nn.Linear(4, 4))
with cpulaunch.autocast():
    os.write(1, f"RANK {os.environ['RANK']} {torch.is_autocast_enabled('cpu')}\\n".encode())
"""


@pytest.mark.slow
def test_ranks_without_a_plan_decide_by_the_rates_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, rates in enumerate((SLOW_BF16, {**SLOW_BF16, "bf16": Rate(900e9, 900e9)})):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches" / str(rank)))
        RateCache.of(cpu_here(), torch.__version__, os.environ).keep(1, rates)
    (tmp_path / "script.py").write_text(AGREE)
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "script.py"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("RANK")) == [
        "RANK 0 False",
        "RANK 1 False",
    ], done.stderr


@pytest.mark.slow
def test_after_a_failed_measurement_the_flags_decide(
    cpulaunch: Run, tmp_path: Path, cache: RateCache
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "torch.py").write_text("raise ImportError('no such torch')\n")
    env = own_cache(tmp_path) | {"PYTHONPATH": str(tmp_path)}
    done = cpulaunch("run", "-n", 1, "--backend", "gloo", "script.py", env=env)
    assert done.returncode == 0
    assert "bf16 and fp32 could not be measured: ImportError: no such torch" in done.stderr
    assert "(not measured; the CPU" in done.stderr


TRAINING = """
import torch, cpulaunch
seen = []
model, optimizer = cpulaunch.prepare(model := torch.nn.Linear(4, 4), torch.optim.SGD(model.parameters(), 0.1))
checkpoint = cpulaunch.Checkpoint("saved", model=model, optimizer=optimizer, every=1)
first = checkpoint.resume()
with cpulaunch.autocast():
    out = model(torch.ones(2, 4))
out.float().sum().backward()
optimizer.step()
checkpoint.save_if_due()
checkpoint.wait()
print("step", first, out.dtype)
"""


@pytest.mark.slow
def test_a_resumed_training_keeps_the_precision_of_its_checkpoint(
    cpulaunch: Run, tmp_path: Path, cache: RateCache
) -> None:
    (tmp_path / "script.py").write_text(TRAINING)
    env = own_cache(tmp_path)
    options = ("-n", 1, "--cores-per-rank", 1, "--backend", "gloo")
    cache.keep(1, SLOW_BF16)
    assert cpulaunch("run", *options, "script.py", env=env).stdout == "step 0 torch.float32\n"
    cache.keep(1, {"fp32": Rate(1e11, 1e11), "bf16": Rate(9e11, 9e11)})  # as on another CPU
    resumed = cpulaunch("run", *options, "script.py", env=env)
    assert resumed.stdout == "step 1 torch.float32\n"
    assert "precision fp32, as in the job that saved the checkpoint" in resumed.stderr
    chosen = cpulaunch("run", *options, "--precision", "bf16", "script.py", env=env)
    assert chosen.stdout == "step 2 torch.bfloat16\n"
    assert "the checkpoint was saved in fp32, and this job computes in bf16" in chosen.stderr
    back = cpulaunch("run", *options, "script.py", env=env)
    assert back.stdout == "step 3 torch.bfloat16\n"
