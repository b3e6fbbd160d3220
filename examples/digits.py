"""Plain DistributedDataParallel: a small convolutional network learns handwritten digits, without a download.

    cpulaunch run -n 2 examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py         # the same script, unchanged

Expected on 2 ranks of 1 core each: at least 97 % test accuracy (typically 98.5 %) within half a minute.
The data are scikit-learn's digits: 1,797 grey images of 8x8 pixels.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    options = arguments()
    dist.init_process_group(options.backend)
    rank, size, threads = dist.get_rank(), dist.get_world_size(), torch.get_num_threads()
    print(
        f"rank {rank} of {size}: backend {dist.get_backend()}, {options.precision}, "
        f"{threads} thread{'' if threads == 1 else 's'}, CPUs {sorted(os.sched_getaffinity(0))}"
    )
    torch.manual_seed(0)
    train, test = data()
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)

    started, images = time.perf_counter(), 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            images += len(x) * size
        if rank == 0 and (epoch + 1) % 5 == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    seconds = time.perf_counter() - started

    accuracy = evaluate(model.module, test, rank, size)
    if rank == 0:
        print(f"test accuracy {accuracy:.2%}, {images / seconds:.0f} images/s, {seconds:.1f} s of training")
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=15)
    # cpulaunch sets these variables; the defaults work on every machine.
    parser.add_argument("--backend", default=os.environ.get("CPULAUNCH_BACKEND", "gloo"))
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), default=os.environ.get("CPULAUNCH_PRECISION", "fp32")
    )
    return parser.parse_args()


def data() -> tuple[TensorDataset, TensorDataset]:
    """Training data (four fifths) and test data (one fifth)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    cut = len(images) * 4 // 5
    return tuple(TensorDataset(images[part], labels[part]) for part in (order[:cut], order[cut:]))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )


def evaluate(model: nn.Module, test: TensorDataset, rank: int, size: int) -> float:
    """Test accuracy: each rank evaluates its share of the images, and an allreduce adds up the counts."""
    model.eval()
    images, labels = (tensor[rank::size] for tensor in test.tensors)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    counts = torch.stack([right, torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


if __name__ == "__main__":
    main()
