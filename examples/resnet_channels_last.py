"""``cpulaunch.prepare`` trains ResNet-50 on handwritten digits, with channels_last convolutions in bf16.

    cpulaunch run -n 2 examples/resnet_channels_last.py
    python examples/resnet_channels_last.py                 # alone

The data are scikit-learn's digits: 1,797 grey images, enlarged to 32x32 pixels with three channels.
Expected on 2 ranks of 1 core each: at least 90 % test accuracy within two minutes.
"""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import cpulaunch


class Bottleneck(nn.Module):
    """He et al., arXiv:1512.03385, figure 5 right; the stride is in the 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.short(x))


class ResNet50(nn.Module):
    """Images [batch, 3, height, width] → logits [batch, classes]."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, 1))
        inputs = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
                inputs = 4 * width
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(x).mean((2, 3)))


def data() -> tuple[TensorDataset, TensorDataset]:
    """Training data (four fifths) and test data (one fifth)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = functional.interpolate(images, size=(32, 32), mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    cut = len(images) * 4 // 5
    return tuple(TensorDataset(images[part], labels[part]) for part in (order[:cut], order[cut:]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    cpulaunch.init()
    torch.manual_seed(0)
    train, test = data()
    model = ResNet50(classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=options.steps + 1)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, scheduler, loader = cpulaunch.prepare(model, optimizer, scheduler, loader)

    step, started = 0, time.perf_counter()
    while step < options.steps:
        for images, labels in loader:
            with cpulaunch.autocast():
                loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if cpulaunch.is_main() and (step % 25 == 0 or step in (1, options.steps)):
                print(f"step {step}: loss {loss.item():.4f}")
            if step == options.steps:
                break
    seconds = time.perf_counter() - started
    accuracy = evaluate(model, test)
    if cpulaunch.is_main():
        speed = step * 32 * cpulaunch.world_size() / seconds
        print(f"test accuracy {accuracy:.2%}, {speed:.0f} images/s, {seconds:.1f} s of training")


def evaluate(model: nn.Module, test: TensorDataset) -> float:
    """Test accuracy: each rank evaluates its share of the images, and an allreduce adds up the counts."""
    model.eval()
    images, labels = (tensor[cpulaunch.rank() :: cpulaunch.world_size()] for tensor in test.tensors)
    with torch.no_grad(), cpulaunch.autocast():
        right = (model(images).argmax(1) == labels).sum()
    counts = torch.stack([right, torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


if __name__ == "__main__":
    main()
