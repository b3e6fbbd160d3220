"""The ways to run one model: its precision, and the engine that runs it.

======  =======================  ==========================  ===================================
        fp32                     bf16                        int8
======  =======================  ==========================  ===================================
eager   PyTorch as it is         weights in bf16             –
script  traced and frozen        the same                    –
compile torch.compile            the same                    PT2E with the X86 quantizer (torchao)
ipex    ``ipex.optimize``        the same                    –
======  =======================  ==========================  ===================================
"""

import argparse
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn

import cpulaunch

PRECISIONS = ("fp32", "bf16", "int8")
ENGINES = ("eager", "script", "compile", "ipex")

Inputs = tuple[Tensor, ...]


def options(description: str) -> argparse.Namespace:
    """The options of an example.  An unsupported combination ends the program."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--engine", choices=ENGINES, default="eager")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="batches of each instance at most")
    parser.add_argument("--small", action="store_true", help="a model that is quick to compile, for a try")
    chosen = parser.parse_args()
    if chosen.batch < 1 or chosen.steps < 1:
        parser.error("--batch and --steps are at least 1")
    if chosen.engine == "ipex" and find_spec("intel_extension_for_pytorch") is None:
        parser.error("--engine ipex requires IPEX, which is not installed here (with torch 2.8: IPEX 2.8)")
    if chosen.precision == "int8" and chosen.engine != "compile":
        parser.error("int8 requires --engine compile, which turns the quantized model into int8 kernels")
    return chosen


def prepared(
    model: nn.Module, samples: Sequence[Inputs], precision: str, engine: str
) -> Callable[..., Tensor]:
    """``model`` in one of the ways above.  ``samples`` are inputs of the size that it will get."""
    model = model.eval()
    if engine == "compile":
        # Weights are constants, which makes int8 kernels of a quantized model, and packs those of others.
        torch._inductor.config.freezing = True
    if precision == "int8":
        return torch.compile(quantized(model, samples))
    if engine == "ipex":
        import intel_extension_for_pytorch as ipex

        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        model = ipex.optimize(model, dtype=dtype, inplace=True)
    elif precision == "bf16":
        model = model.to(torch.bfloat16)
    run: Callable[..., Tensor] = InBf16(model).eval() if precision == "bf16" else model
    if engine == "compile":
        return torch.compile(run)
    if engine == "eager":
        return run
    with torch.inference_mode():
        return torch.jit.freeze(torch.jit.trace(run, samples[0], check_trace=False))


class InBf16(nn.Module):
    """``model``, whose weights are bf16, with inputs and outputs in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*(x.bfloat16() if x.is_floating_point() else x for x in inputs)).float()


def quantized(model: nn.Module, samples: Sequence[Inputs]) -> nn.Module:
    """``model`` with int8 weights and activations, whose ranges are those of ``samples``."""
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    with torch.no_grad():
        observed = prepare_pt2e(torch.export.export(model, samples[0]).module(), quantizer)
        for one in samples:
            observed(*one)
        return convert_pt2e(observed)


Judge = Callable[[Tensor, Tensor], float]
"""(predictions, truth) → quality or error, in per cent."""


def measure(
    run: Callable[..., Tensor], batches: Sequence[tuple[Inputs, Tensor]], what: str, judge: Judge
) -> float:
    """State throughput and latency of ``batches`` of (inputs, truth), and ``what``, the value of ``judge``,
    which is returned.
    """
    with torch.inference_mode():
        for _ in range(3):  # the first ones compile, trace or pack
            run(*batches[0][0])
        seconds, judged = [], []
        for inputs, truth in batches:
            began = time.perf_counter()
            found = run(*inputs)
            seconds.append(time.perf_counter() - began)
            judged.append(judge(found, truth))
    for each in seconds:
        cpulaunch.metric("latency", 1000 * each, "ms")
    samples = sum(len(truth) for _, truth in batches)
    cpulaunch.metric("throughput", samples / sum(seconds), "samples/s")
    mean = sum(judged) / len(judged)
    cpulaunch.metric(what, mean, "%")
    return mean
