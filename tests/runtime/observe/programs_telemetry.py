"""Training scripts without cpulaunch's interface, for test_telemetry.py: ``programs_telemetry.py NAME``."""

from __future__ import annotations

import sys
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTHS = 64, 128, 32
BATCH, STEPS, TOKENS = 16, 12, 10
SLOW_RANK = 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    first, second, third = WIDTHS
    return nn.Sequential(nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third))


def loader(ranks: int = 1) -> DataLoader:
    samples = BATCH * STEPS * ranks
    return DataLoader(TensorDataset(torch.randn(samples, WIDTHS[0]), torch.randn(samples, WIDTHS[-1])), BATCH)


def plain(backend: str) -> None:
    """Train with DDP, with an evaluation between two epochs; its samples belong to no step."""
    torch.distributed.init_process_group(backend)
    parallel = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    for _ in range(2):
        for inputs, labels in loader():
            optimizer.zero_grad()
            nn.functional.mse_loss(parallel(inputs), labels).backward()
            optimizer.step()
        for inputs, _ in loader():
            with torch.no_grad():
                parallel(inputs)


def slow_rank(backend: str) -> None:
    """One rank takes longer than the others to compute."""
    torch.distributed.init_process_group(backend)
    parallel = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        time.sleep(0.2 * (torch.distributed.get_rank() == SLOW_RANK))
        parallel(torch.ones(BATCH, WIDTHS[0])).sum().backward()
        optimizer.step()


def prepared(backend: str) -> None:
    """Training with ``cpulaunch.prepare`` of a model with a convolution before the layers."""
    import cpulaunch

    cpulaunch.init()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(WIDTHS[0], WIDTHS[1]))
    net, optimizer = cpulaunch.prepare(net, torch.optim.SGD(net.parameters(), 0.01))
    for step in range(STEPS):
        with cpulaunch.autocast():
            loss = net(torch.randn(BATCH, 3, 6, 6)).sum()
        loss.backward()
        optimizer.step()
        cpulaunch.log(loss=step)
        optimizer.zero_grad()


def trainer(backend: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=2)  # fmt: skip
    data = [{"input_ids": (tokens := torch.randint(50, (TOKENS,))), "labels": tokens} for _ in range(64)]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory, max_steps=STEPS, report_to=[], per_device_train_batch_size=4,
            disable_tqdm=True, save_strategy="no", gradient_accumulation_steps=2,
        )  # fmt: skip
        Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
    print("trained")
