"""The rate of matrix products on this process's cores, from the user's cache or measured.

The products measured are the three of a linear layer of a transformer: its output, and the gradients of its
input and weights.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from cpulaunch.discovery.host.rate_cache import Rate, RateCache
from cpulaunch.discovery.host.this_host import cpu_here
from cpulaunch.model.rates import ProductRates

HIDDEN, WIDE = 768, 3072
"""Inputs and outputs of the linear layer."""

TOKENS, MOST_TOKENS = 256, 4096
"""Rows of the input per thread, and their maximum.  A product then takes a few milliseconds."""

FEW_TOKENS = 32
"""Rows of a first, short product.  CPUs that emulate bf16 would take seconds for a product of full size."""

LONG = 0.15
"""Maximum seconds of a product of full size; if it would take longer, only the short one is measured."""

LIMIT = 1.0
"""Seconds in which all products are repeated."""

PREEMPTED_EVERY = 0.05
"""Minimum seconds between two preemptions on an idle machine; if they are more frequent, it is busy."""


class Measurement(NamedTuple):
    """Precision → rate.  ``steady``: no other program used these cores during the measurement."""

    rates: dict[str, Rate]
    steady: bool


def product_rates(torch: Any) -> ProductRates:
    """Return the rates of fp32 and bf16 with torch's current number of threads."""
    rates = known_rates(torch, ("fp32", "bf16"))
    return ProductRates(torch.get_num_threads(), rates["fp32"].layer, rates["bf16"].layer)


def peak(torch: Any, precision: str) -> float:
    """Return the FLOP/s of the fastest product in bf16, fp16, fp32 or fp64."""
    return known_rates(torch, (precision,))[precision].best


def known_rates(torch: Any, precisions: Sequence[str]) -> dict[str, Rate]:
    """Return the rate of each precision from the cache; if any is missing, measure all."""
    cache, threads = RateCache.of(cpu_here(), torch.__version__, os.environ), torch.get_num_threads()
    with cache.locked():
        kept = {precision: cache.rate(threads, precision) for precision in precisions}
        known = {precision: rate for precision, rate in kept.items() if rate}
        if len(known) < len(precisions):
            known, steady = measure(torch, precisions)
            if steady:
                cache.keep(threads, known)
            elif threads > 1:
                known = _by_one_thread(torch, precisions)
    return known


def _by_one_thread(torch: Any, precisions: Sequence[str]) -> dict[str, Rate]:
    """Measure one thread, and multiply by the number of threads.

    On a busy machine, this is closer to the undisturbed rate, because several threads wait for the slowest of
    them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = measure(torch, precisions).rates
    finally:
        torch.set_num_threads(threads)
    return {name: Rate(rate.layer * threads, rate.best * threads) for name, rate in rates.items()}


def measure(torch: Any, precisions: Sequence[str]) -> Measurement:
    """Measure the rates: repeat all products in turn, and take the shortest time of each.

    Takes a second, or two if a precision is emulated.  Draws no random numbers.
    """
    tokens = min(TOKENS * torch.get_num_threads(), MOST_TOKENS)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        products = {
            name: [_Product(torch, tokens, *shape) for shape in _shapes(torch, tokens, name)]
            for name in precisions
        }
        every = [product for each in products.values() for product in each]
        until = time.perf_counter() + LIMIT
        while time.perf_counter() < until:
            for product in every:
                product.run()
    rates = {name: _rate(each) for name, each in products.items()}
    return Measurement(rates, all(product.steady for product in every))


def _shapes(torch: Any, tokens: int, precision: str) -> Sequence[tuple[Any, Any]]:
    """Return the operands of the three products: output, gradient of the input, gradient of the weights."""
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}[precision]
    sizes = ((tokens, HIDDEN), (WIDE, HIDDEN), (tokens, WIDE))
    inputs, weights, grad = (torch.full(size, 0.5, dtype=getattr(torch, dtype)) for size in sizes)
    return ((inputs, weights.t()), (grad, weights), (grad.t(), inputs))


class _Product:
    """One product: its ``flops``, and the shortest time in ``seconds``."""

    def __init__(self, torch: Any, tokens: int, left: Any, right: Any) -> None:
        self._mm = torch.mm
        # The number of tokens is the first dimension of ``left``, or the dimension that is summed over.
        first = left.shape[0] == tokens
        few = (left[:FEW_TOKENS], right) if first else (left[:, :FEW_TOKENS], right[:FEW_TOKENS])
        more = tokens / FEW_TOKENS
        self._use(*few)
        self.run()  # slower than later calls, which use its cached code
        if self.seconds * more < 10 * LONG:
            self.run()
        if self.seconds * more < LONG:
            self._use(left, right)

    def _use(self, left: Any, right: Any) -> None:
        self._operands = left, right
        self.flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
        self.seconds, self.steady = float("inf"), False

    def run(self) -> None:
        preempted, began = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.perf_counter()
        self._mm(*self._operands)
        seconds = time.perf_counter() - began
        preempted = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - preempted
        if seconds < self.seconds:
            self.seconds, self.steady = seconds, preempted <= seconds / PREEMPTED_EVERY


def _rate(products: Sequence[_Product]) -> Rate:
    # The mean of seconds per FLOP, because the products may have different numbers of tokens.
    layer = len(products) / sum(product.seconds / product.flops for product in products)
    return Rate(layer, max(product.flops / product.seconds for product in products))
