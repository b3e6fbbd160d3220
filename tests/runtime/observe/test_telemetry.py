"""The telemetry.jsonl of training scripts without cpulaunch's interface."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import clean_environment, intel_python, needs_bf16
from support.marks import repeat

from cpulaunch import ledger
from cpulaunch.ccl.installed import cache_directory
from cpulaunch.runtime.observe import telemetry
from cpulaunch.runtime.observe.flops import FIRST, Flops
from cpulaunch.runtime.observe.telemetry import OTHERS, Recorder, sizes
from cpulaunch.runtime.product_rates import measure
from runtime.observe.programs_telemetry import BATCH, STEPS, TOKENS, WIDTHS

PROGRAMS = Path(__file__).with_name("programs_telemetry.py")
LIMIT = 150.0

Row = dict[str, Any]


def run(
    directory: Path, name: str, backend: str = "ccl", python: str = sys.executable, *options: str
) -> list[Row]:
    """Run a job of two ranks, and return its rows, beginning with the file's first line."""
    cache = directory / "cache" / "cpulaunch"
    cache.mkdir(parents=True)
    (cache / "ccl").symlink_to(cache_directory())  # only peaks are measured again
    command = [
        python, "-m", "cpulaunch", "run", "-n", "2", "--oversubscribe", "--backend", backend, "--precision", "bf16",
        *options, PROGRAMS, name, backend,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=LIMIT,
        env=clean_environment(HF_HUB_OFFLINE="1", XDG_CACHE_HOME=str(directory / "cache")),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
    (file,) = directory.glob("runs/*/telemetry.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps_of(rows: list[Row], rank: int) -> list[Row]:
    return [row for row in rows if row.get("rank") == rank and "step" in row]


def flops_by_hand() -> int:
    """FLOPs of a step of one rank: three matrix products for each layer, except for the inputs' gradients.

    A product of n × k and k × m matrices takes n·m·k multiplications, and as many additions.
    """
    first, second, third = WIDTHS
    return 2 * BATCH * (3 * first * second + 3 * second * third - first * second)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_a_plain_script(tmp_path: Path, backend: str) -> None:
    head, *rows = run(tmp_path, "plain", backend)
    assert head["flops_per_step"] == 2 * flops_by_hand()
    peaks = [row["peak_flops"] for row in rows if "peak_flops" in row]
    assert head["peak_flops"] == pytest.approx(sum(peaks), abs=2)
    assert 1e8 < min(peaks) <= max(peaks) < 1e14
    assert head["precision"] == "bf16"
    for rank in (0, 1):
        steps = steps_of(rows, rank)
        assert steps[-1]["step"] == sum(row.get("steps", 1) for row in steps) == 2 * STEPS
        assert {row["samples"] / row.get("steps", 1) for row in steps} == {BATCH}
        assert [row["flops"] for row in steps if "flops" in row] == [flops_by_hand()]
        assert all(0 < row["input"] < row["seconds"] for row in steps)
        times = [row["time"] for row in steps]
        assert times == sorted(times)
        gradients = 4 * sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
        assert steps[-1]["bytes"] == gradients * steps[-1].get("steps", 1)
        assert all(0 < row["communication"] < row["seconds"] for row in steps[1:])
        assert all(0 <= row["waiting"] <= row["communication"] for row in steps[1:])


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    head, *rows = run(tmp_path, "trainer", "gloo")
    steps = steps_of(rows, 0)
    assert steps[-1]["step"] == STEPS
    # A step has two batches, and one more is loaded ahead.
    assert sum(row["samples"] for row in steps) == 2 * 4 * STEPS
    assert all(row["tokens"] == TOKENS * row["samples"] for row in steps)
    assert head["precision"] == "bf16"
    assert head["flops_per_step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", pytest.param("ipex", marks=[needs_bf16, pytest.mark.repeats])])
def test_cpulaunchs_own_engines(tmp_path: Path, engine: str) -> None:
    """A 3 × 3 convolution from 3 to 4 channels, and a layer: forward pass and weight gradients.

    IPEX computes other gradients if its operations are observed, so its steps are not counted.
    """
    python = str(intel_python()) if engine == "ipex" else sys.executable
    head, *rows = run(tmp_path, "prepared", "gloo", python, "--engine", engine)
    convolution = 2 * BATCH * 4 * 4 * 4 * (3 * 3 * 3)
    layer = 2 * BATCH * WIDTHS[0] * WIDTHS[1]
    counted = (2 * (2 * convolution + 3 * layer), "bf16") if engine == "native" else (None, None)
    assert (head["flops_per_step"], head["precision"]) == counted
    losses = [row["loss"] for row in steps_of(rows, 0) if "loss" in row]  # it is reported after the step
    assert losses[-1] == STEPS - 1


# ---- in this process


class Script:
    """A script's recorder; the test reads its ledger as an agent does."""

    def __init__(self, flops: Flops | None = None) -> None:
        self.memory = mmap.mmap(-1, ledger.SIZE)
        if flops is None:
            flops = Flops(torch)
            flops.give_up()
        self.recorder = Recorder(self.memory, flops)

    def step(self, number: int) -> ledger.Step:
        found = ledger.step(self.memory, number)
        assert found
        return found

    @property
    def last(self) -> int:
        return ledger.recorded(self.memory).last


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)


def test_the_first_optimizer_that_steps_counts_steps() -> None:
    script, first, other = Script(), optimizer(), optimizer()
    for _ in range(3):
        script.recorder.end_step(first)
        for _ in range(OTHERS - 1):
            script.recorder.end_step(other)
    assert script.last == 3


def test_another_optimizer_counts_steps_if_the_first_stops() -> None:
    script, first, other = Script(), optimizer(), optimizer()
    script.recorder.end_step(first)
    for _ in range(OTHERS + 2):
        script.recorder.end_step(other)
    assert script.last == 4
    del other
    script.recorder.end_step(first)
    assert script.last == 5


def test_samples_are_counted_from_the_loader_of_the_training_loop() -> None:
    script, trained = Script(), optimizer()
    for iterator, samples in ((1, 8), (2, 100), (1, 8), (3, 16)):
        script.recorder.add_batch(iterator, 10, samples, 2 * samples)
    script.recorder.end_step(trained)
    assert [script.step(1).fields[name] for name in ("samples", "tokens", "input")] == [16, 32, 40]
    for _ in range(2):
        script.recorder.add_batch(1, 10, 8, 0)
    script.recorder.end_step(trained)
    assert script.step(2).fields["samples"] == 16 + 16


def test_an_iterator_with_the_id_of_an_earlier_iterator_is_distinguished() -> None:
    """The earlier iterator was an evaluation's."""
    script = Script()
    script.recorder.add_batch(1, 10, 100, 0)
    script.recorder.begin(1, iterator=1)
    script.recorder.add_batch(1, 10, 8, 0)
    script.recorder.end_step(optimizer())
    assert script.step(1).fields["samples"] == 8


def test_a_loss_belongs_to_the_last_step_until_the_next_batch() -> None:
    script, trained = Script(), optimizer()
    script.recorder.log(4.0)
    script.recorder.end_step(trained)
    script.recorder.end_step(trained)
    script.recorder.log(3.0)
    assert (script.step(1).fields["loss"], script.step(2).fields["loss"]) == (4.0, 3.0)
    script.recorder.add_batch(1, 10, 8, 0)
    script.recorder.log(2.0)
    script.recorder.end_step(trained)
    assert (script.step(2).fields["loss"], script.step(3).fields["loss"]) == (3.0, 2.0)


def test_a_loss_with_a_gradient_causes_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch once warned on every rank, if the loss was logged before or after its backward pass."""
    script = Script()
    monkeypatch.setattr(telemetry, "recorder", script.recorder)
    script.recorder.end_step(optimizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        telemetry.log(loss=(torch.ones(3, requires_grad=True) / 2).sum())
        assert script.step(1).fields["loss"] == 1.5
        telemetry.log(loss=2)
    assert script.step(1).fields["loss"] == 2.0


def test_outside_a_job_a_loss_is_ignored() -> None:
    assert telemetry.recorder is None
    telemetry.log(loss=torch.tensor(1.0))


def test_work_before_training_is_not_part_of_the_first_step() -> None:
    script = Script()
    script.recorder.add_batch(1, 10**9, 8, 0)
    script.recorder.begin(now := ledger.step(script.memory, 0).ended_at + 1)  # type: ignore[union-attr]
    assert script.step(0).ended_at == now
    script.recorder.add_batch(1, 10, 8, 0)
    script.recorder.end_step(optimizer())
    assert (script.step(1).fields["samples"], script.step(1).fields["input"]) == (8, 10)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.ones(4, 2), (4, 0)),
        ([torch.ones(4, 2), torch.ones(4)], (4, 0)),
        ({"input_ids": torch.ones(4, 7), "labels": torch.ones(4)}, (4, 28)),
        (({"input_ids": torch.ones(4, 7)}, torch.ones(4)), (4, 28)),
        ({"names": ["a"], "x": torch.ones(3)}, (3, 0)),
        ("text", (0, 0)),
        ([[[[[torch.ones(4)]]]]], (0, 0)),
    ],
)
def test_sizes_of_batches(batch: Any, found: tuple[int, int]) -> None:
    assert sizes(batch, torch.Tensor) == found


def counted(train: Any) -> int | None:
    flops = Flops(torch)
    flops.end_step(2)
    try:
        train()
    finally:
        result = flops.end_step(3)
    return result


def test_attention_on_cpus_is_counted() -> None:
    """2 products of 8 × 16 and 16 × 8 matrices for each of 6 heads, and 5 products in the backward pass."""
    q, k, v = (torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3))
    product = 2 * 8 * 8 * 16 * 6
    attend = torch.nn.functional.scaled_dot_product_attention
    assert counted(lambda: attend(q, k, v).sum().backward()) == (2 + 5) * product


def test_a_scripts_own_dispatch_mode_is_left_alone() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

    class Own(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    flops = Flops(torch)
    with Own():
        flops.end_step(2)
        torch.ones(2, 2) @ torch.ones(2, 2)
        assert flops.end_step(3) is None
    assert _get_current_dispatch_mode() is None


def run_alone(code: str) -> None:
    """Run code in a process of its own, because torch.compile leaves traces in the process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def test_a_program_that_has_called_torch_compile_is_not_counted() -> None:
    """The compiled function may run for the first time in the counted step."""
    code = (
        "import torch\nfrom cpulaunch.runtime.observe.flops import EVERY, FIRST, Flops\n"
        "double = torch.compile(lambda x: 2 * x, backend='eager')\nflops = Flops(torch)\n"
        "for last in (FIRST, EVERY):\n"
        "    flops.end_step(last - 1)\n"
        "    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None\n"
        "    double(torch.ones(2, 3) @ torch.ones(3, 4))\n"
        "    assert flops.end_step(last) is None\n"
    )
    run_alone(code)


def test_torch_compile_in_a_counted_step_compiles_and_ends_counting() -> None:
    code = (
        "import torch\nfrom cpulaunch.runtime.observe.flops import EVERY, FIRST, Flops\n"
        "compiles, flops = torch.compile, Flops(torch)\nflops.end_step(FIRST - 1)\n"
        "assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None\n"
        "double = torch.compile(lambda x: 2 * x, backend='eager', fullgraph=True)\n"
        "assert double(torch.ones(1)) == 2\n"
        "assert (flops.end_step(FIRST), flops.end_step(EVERY - 1)) == (None, None)\n"
        "assert torch.utils._python_dispatch._get_current_dispatch_mode() is None\n"
        "assert torch.compile is compiles\n"
    )
    run_alone(code)


def test_a_lazy_module_may_get_its_parameters_in_a_counted_step() -> None:
    compiles = torch.compile
    layer = torch.nn.LazyLinear(3, bias=False)
    assert counted(lambda: layer(torch.ones(2, 4))) == 2 * 2 * 4 * 3
    assert torch.compile is compiles


def test_a_traced_step_is_not_counted_but_the_next_untraced_step_is() -> None:
    """A counted step takes longer, which the trace would show."""
    flops = Flops(torch)
    traced = [True, True, False]
    flops.traced = lambda: traced.pop(0)
    found = []
    for number in range(1, FIRST + 4):
        found.append(flops.end_step(number))
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert found == [None] * (FIRST + 1) + [16, None]


def test_a_process_forked_in_a_counted_step_counts_nothing() -> None:
    """The process is a loader's worker, in which counting would slow down everything."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    script = Script(Flops(torch))
    trained = optimizer()
    for _ in range(2):
        script.recorder.end_step(trained)
    assert _get_current_dispatch_mode() is not None
    if (child := os.fork()) == 0:
        os._exit(_get_current_dispatch_mode() is not None)
    script.recorder.end_step(trained)
    assert os.waitpid(child, 0)[1] == 0
    assert _get_current_dispatch_mode() is None
    assert script.last == 3


def test_an_exception_in_a_counted_step_reaches_the_script_unchanged() -> None:
    flops = Flops(torch)
    flops.end_step(2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    torch.ones(2, 2) @ torch.ones(2, 2)
    assert flops.end_step(3) == 16


def test_measuring_consumes_no_random_numbers() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    measure(torch, ("bf16", "fp32"))
    assert torch.rand(1) == expected
