"""A training that can be killed at any time, and resumes from its last checkpoint when it is started again.

    cpulaunch run -n 2 --max-restarts 3 --checkpoint-every 50 examples/checkpoint.py
    torchrun --nproc-per-node 2 examples/checkpoint.py         # the same script, unchanged

It prints a digest of the final weights, which doesn't depend on how often the job was restarted.  The data
are scikit-learn's digits with noise, shuffled in each epoch; the network has dropout.
"""

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import cpulaunch


def main() -> None:
    options = arguments()
    cpulaunch.init()
    torch.manual_seed(cpulaunch.rank())  # different dropout and noise on each rank
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)
    loader = DataLoader(Digits(), batch_size=16, shuffle=True, drop_last=True, num_workers=options.workers)
    model, optimizer, scheduler, loader = cpulaunch.prepare(model, optimizer, scheduler, loader)
    checkpoint = cpulaunch.Checkpoint(
        options.directory, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
    )
    model.train()
    for _, step, (images, labels) in checkpoint.steps(loader, epochs=1 + options.steps // len(loader)):
        if step == options.steps:
            break
        with cpulaunch.autocast():
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        checkpoint.save_if_due()
        if cpulaunch.is_main() and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    checkpoint.wait()
    if cpulaunch.is_main():
        print(f"weights {digest(cpulaunch.unwrap(model))}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--directory", default="ckpt", help="of the checkpoints, shared by all hosts")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, for each rank")
    return parser.parse_args()


class Digits(Dataset):
    """1,797 grey images of 8×8 pixels, with random noise."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
        self.labels = torch.tensor(digits.target)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        return image + 0.05 * torch.randn_like(image), self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(128, 10),
    )


def digest(model: nn.Module) -> str:
    """Return a hash of the weights."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    main()
