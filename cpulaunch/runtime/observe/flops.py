"""The model's FLOPs per step, counted in a few steps by torch's own formulas.

A counted step runs under a dispatch mode: torch passes it every operation, with the shapes and types that
arrive below autograd and autocast, and computes the same as without it.  Code compiled by torch.compile shows
no operations, and running it eagerly would change its numbers.  So nothing is counted in a program that
compiles anything.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cpulaunch.runtime.log import log_once

FIRST, EVERY = 3, 10_000
"""The steps that are counted: the third, as the first ones differ, and every ``EVERY``-th.  If such a
step is traced, the next step that isn't traced takes its place."""

PRECISIONS = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float64": "fp64",
}


class Flops:
    """Counts the FLOPs of some steps of this rank.

    ``precision`` is the precision of most FLOPs, empty until some were counted.  ``peak`` is the rate in
    FLOP/s that was measured for this rank's cores in that precision, None until it was measured.
    """

    def __init__(self, torch: Any) -> None:
        self.precision = ""
        self.peak: float | None = None
        self._torch = torch
        self._counting: Any = None  # the dispatch mode
        self._gave_up = False
        self._due = False
        self.traced: Callable[[], bool] = lambda: False
        """Whether the next step is traced; a step that is counted takes longer than others."""

    def stepped(self, number: int) -> int | None:
        """End step ``number``.  Returns its FLOPs if they were counted, else None."""
        flops = self._end() if self._counting else None
        if number + 1 == FIRST or (number + 1) % EVERY == 0:
            self._due = True
        if self._due and not self.traced():
            self._due = False
            self._begin()
        return flops

    def measure_peak(self) -> None:
        """Find the peak for ``precision``.  It may be measured, so all ranks do this at the end of a step."""
        from cpulaunch.runtime.product_rates import peak

        self.peak = peak(self._torch, self.precision)

    def give_up(self) -> None:
        """Stop counting for good."""
        self._gave_up = True

    def leave(self) -> None:
        """Stop counting in a process forked from the rank, perhaps in the middle of a counted step."""
        self.give_up()
        if self._counting:
            self._end()

    def _begin(self) -> None:
        modes = self._torch.utils._python_dispatch
        if self._gave_up or modes._get_current_dispatch_mode() is not None:
            return  # the script's own mode might end before ours
        if _compiles():
            self.give_up()
            return
        if "intel_extension_for_pytorch" in sys.modules:
            return  # gradients differ under a mode: IPEX's layer_norm has no autograd kernel there
        try:
            counting = _counting_mode(self._torch)
            counting.__enter__()
        except Exception as e:  # this torch lacks what the mode builds on
            self._failed(e)
        else:
            self._counting = counting

    def _end(self) -> int | None:
        counting, self._counting = self._counting, None
        if self._torch.utils._python_dispatch._get_current_dispatch_mode() is not counting:
            self.give_up()  # the script's own mode ended ours, or is still active
            return None
        counting.__exit__(None, None, None)
        if counting.error is not None:
            self._failed(counting.error)
            return None
        if not counting.flops:
            return None
        self.precision = self.precision or counting.flops.most_common(1)[0][0]
        return int(sum(counting.flops.values()))

    def _failed(self, error: Exception) -> None:
        self.give_up()
        log_once(f"the model's FLOPs can't be counted, so there is no MFU: {type(error).__name__}: {error}")


def _compiles() -> bool:
    """Return whether this program has called torch.compile, or has run a compiled function."""
    frames = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {}).get("frames")
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return bool(frames) or any(map(callable, backends.values()))


def _counting_mode(torch: Any) -> Any:
    formulas = _formulas(torch)
    plain = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        """Sums up FLOPs by precision; ``error`` is the exception of a formula that failed."""

        supports_higher_order_operators = True

        def __init__(self) -> None:
            super().__init__()
            self.flops: Counter[str] = Counter()
            self.error: Exception | None = None

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not plain.issuperset(types):
                fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
                if any(issubclass(each, fake) for each in types):
                    return func(*args, **(kwargs or {}))  # torch infers shapes here and computes nothing
                return NotImplemented  # the tensor's class goes first: a DTensor's parts count
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
    """Return operation → formula: torch's own, and some for CPU operations that torch has none for."""
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
    if hasattr(kernels, "attention"):  # the native engine's
        ours |= {kernels.attention: attention, kernels.attention_backward: attention_backward}
    return {**ours, **flop_counter.flop_registry}
