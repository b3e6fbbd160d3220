"""Counts the FLOPs of a few steps by torch's own formulas.

A counted step runs in a dispatch mode, to which torch passes each operation below autograd and autocast.  The
mode doesn't change the results.  It doesn't get the operations of compiled code, so nothing is counted in a
program that calls torch.compile.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cpulaunch.runtime.log import log_once

FIRST, EVERY = 3, 10_000
"""Steps to count: step ``FIRST``, and each multiple of ``EVERY``.  If such a step is traced, the next step
without a trace is counted instead."""

PRECISIONS = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float64": "fp64",
}


class Flops:
    """Counts the FLOPs of some steps of this rank.

    ``precision``: the precision of most FLOPs, empty before the first counted step.  ``peak``: the measured
    FLOP/s of this rank's cores in that precision, or None.
    """

    def __init__(self, torch: Any) -> None:
        self.precision = ""
        self.peak: float | None = None
        self._torch = torch
        self._counting: Any = None  # the dispatch mode
        self._compile: Any = None  # torch.compile, while a step is counted
        self._gave_up = False
        self._due = False
        self.traced: Callable[[], bool] = lambda: False
        """Returns whether the next step is traced; counting would make it slower."""

    def end_step(self, number: int) -> int | None:
        """End step ``number``.  Returns its FLOPs, or None if it wasn't counted."""
        flops = self._end() if self._counting else None
        if number + 1 == FIRST or (number + 1) % EVERY == 0:
            self._due = True
        if self._due and not self.traced():
            self._due = False
            self._begin()
        return flops

    def measure_peak(self) -> None:
        """Set ``peak``, which may have to be measured, so all ranks must call this at the same time."""
        from cpulaunch.runtime.product_rates import peak

        self.peak = peak(self._torch, self.precision)

    def give_up(self) -> None:
        """Stop counting for good."""
        self._gave_up = True

    def stop(self) -> None:
        """Stop counting for good, also in the middle of a counted step.  A forked process must call this."""
        self.give_up()
        if self._counting:
            self._end()

    def _begin(self) -> None:
        modes = self._torch.utils._python_dispatch
        if self._gave_up or modes._get_current_dispatch_mode() is not None:
            return  # the script has its own dispatch mode, which could end before this mode
        if _compiles():
            self.give_up()
            return
        if "intel_extension_for_pytorch" in sys.modules:
            return  # IPEX's layer_norm has no autograd kernel in a dispatch mode, so gradients would differ
        try:
            counting = _counting_mode(self._torch)
            counting.__enter__()
        except Exception as e:  # this version of torch lacks a name
            self._fail(e)
        else:
            self._counting = counting
            self._compile = self._torch.compile
            self._torch.compile = self._stop_and_compile

    def _stop_and_compile(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``torch.compile`` in a counted step: torch compiles nothing in a dispatch mode."""
        compiling = self._compile
        self.stop()
        return compiling(*args, **kwargs)

    def _end(self) -> int | None:
        counting, self._counting = self._counting, None
        if self._torch.compile == self._stop_and_compile:  # nobody else has replaced it since
            self._torch.compile = self._compile
        if self._torch.utils._python_dispatch._get_current_dispatch_mode() is not counting:
            self.give_up()  # the script's own mode ended this one, or is still active
            return None
        counting.__exit__(None, None, None)
        if counting.error is not None:
            self._fail(counting.error)
            return None
        if not counting.flops:
            return None
        self.precision = self.precision or counting.flops.most_common(1)[0][0]
        return int(sum(counting.flops.values()))

    def _fail(self, error: Exception) -> None:
        self.give_up()
        log_once(f"the model's FLOPs can't be counted, so there is no MFU: {type(error).__name__}: {error}")


def _compiles() -> bool:
    """Return whether this program has called torch.compile, or has run a compiled function."""
    frames = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {}).get("frames")
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return bool(frames) or any(map(callable, backends.values()))


def _counting_mode(torch: Any) -> Any:
    formulas = _formulas(torch)
    plain = torch.Tensor.__torch_dispatch__  # of tensors, and of subclasses without their own

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        """Sums up FLOPs by precision; ``error`` is the exception of a formula that failed."""

        supports_higher_order_operators = True

        def __init__(self) -> None:
            super().__init__()
            self.flops: Counter[str] = Counter()
            self.error: Exception | None = None

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(each.__torch_dispatch__ is not plain for each in types):
                fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
                if any(issubclass(each, fake) for each in types):
                    return func(*args, **(kwargs or {}))  # shape inference, which computes nothing
                return NotImplemented  # leave it to the class: a DTensor calls operations on its parts
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            formula = formulas.get(getattr(func, "_overloadpacket", None))
            if formula is not None:
                try:
                    kind = PRECISIONS.get(str(args[0].dtype), "fp32")
                    self.flops[kind] += formula(*args, **kwargs, out_val=out)
                except Exception as e:
                    self.error = e
            return out

    return Counting()


def _formulas(torch: Any) -> dict[Any, Any]:
    """Return operation → formula: torch's formulas, and more for operations on CPUs."""
    flop_counter: Any = import_module("torch.utils.flop_counter")

    def attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
        return flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape)

    def attention_backward(
        grad: Any, query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any
    ) -> Any:
        return flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)

    def linear(inputs: Any, weight: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
        return 2 * inputs.numel() * weight.shape[0]

    found: dict[str, Any] = {
        "_scaled_dot_product_flash_attention_for_cpu": attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
        "mkldnn_linear": linear,
    }
    aten, kernels = torch.ops.aten, torch.ops.cpulaunch
    ours = {getattr(aten, name): formula for name, formula in found.items() if hasattr(aten, name)}
    if hasattr(kernels, "attention"):
        ours |= {kernels.attention: attention, kernels.attention_backward: attention_backward}
    return {**ours, **flop_counter.flop_registry}
