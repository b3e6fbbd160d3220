"""FSDP2 on ccl: each of two ranks has half of a transformer's parameters, gradients and optimizer states.

    cpulaunch run -n 2 examples/fsdp.py

The model learns to sort short lists of digits.  torch's ``fully_shard`` uses cpulaunch's process group.
Expected on 2 ranks of 1 core each: at least 95 % of the digits are correct within a minute, and each rank
keeps half of the parameters, plus a little padding.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import cpulaunch

LENGTH, DIGITS, WIDTH = 12, 10, 128


class Sorter(nn.Module):
    """Digits [batch, LENGTH] → logits of the sorted digits [batch, LENGTH, DIGITS]."""

    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Embedding(DIGITS, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.digit(digits) + self.place))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()

    cpulaunch.init()
    torch.manual_seed(0)
    model = Sorter()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (cpulaunch.world_size(),))
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh, mp_policy=bf16)
    fully_shard(model, mesh=mesh, mp_policy=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    mine = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"rank {cpulaunch.rank()} keeps {mine:,} of {parameters:,} parameters")
    generator = torch.Generator().manual_seed(cpulaunch.rank())
    started = time.perf_counter()
    for step in range(options.steps):
        digits = torch.randint(DIGITS, (64, LENGTH), generator=generator)
        loss = cross_entropy(model(digits).flatten(0, 1).float(), digits.sort().values.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if cpulaunch.is_main() and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    seconds = time.perf_counter() - started

    digits = torch.randint(DIGITS, (256, LENGTH), generator=generator)
    with torch.no_grad():
        right = (model(digits).argmax(-1) == digits.sort().values).float().mean()
    dist.all_reduce(right)
    if cpulaunch.is_main():
        print(f"{right.item() / cpulaunch.world_size():.1%} of the digits right, {seconds:.1f} s of training")


if __name__ == "__main__":
    main()
