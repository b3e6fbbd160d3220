"""ResNet-50 with random weights: how fast it is, and how much a precision loses of fp32, without a download.

    cpulaunch run --instances 2 examples/inference/resnet50.py --precision bf16
    cpulaunch run --latency-mode examples/inference/resnet50.py --precision int8 --engine compile

The images are scikit-learn's digits, enlarged to 224x224 pixels.  The end shows throughput and latency of
all instances, and how far the features are from those of fp32: the norm of the difference, in per cent of
theirs.
"""

import sys
from pathlib import Path

import torch
import ways
from sklearn.datasets import load_digits
from torch import Tensor, nn

import cpulaunch

sys.path.append(str(Path(__file__).parent.parent))
from resnet_channels_last import ResNet50

PIXELS, FEW_PIXELS = 224, 64
"""The height of an image, which is its width, and that of a small one."""

CALIBRATION = 32
"""Images by which batch norms know their statistics, and int8 the ranges of activations."""


def network(images: Tensor) -> nn.Module:
    """ResNet-50 without its last layer, and with the statistics of ``images`` in its batch norms."""
    torch.manual_seed(0)
    body = ResNet50().to(memory_format=torch.channels_last)
    body.classify = nn.Identity()
    for module in body.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean of all batches
    with torch.no_grad():
        body(images)
    return body.eval()


def difference(found: Tensor, wanted: Tensor) -> float:
    return 100 * ((found - wanted).norm() / wanted.norm()).item()


def main() -> None:
    options = ways.options(__doc__)
    small = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16

    pixels = FEW_PIXELS if options.small else PIXELS

    def large(some: Tensor) -> Tensor:
        images = nn.functional.interpolate(some, (pixels, pixels)).repeat(1, 3, 1, 1)
        return images.to(memory_format=torch.channels_last)

    known = large(small[:CALIBRATION])
    model = network(known)
    whole = (len(small) - CALIBRATION) // options.batch * options.batch
    parts = small[CALIBRATION : CALIBRATION + whole].split(options.batch)
    asked = [large(part) for part in cpulaunch.shard(parts)[: options.steps]]
    with torch.inference_mode():
        wanted = [model(images) for images in asked]
    samples = [(images,) for images in known.split(options.batch) if len(images) == options.batch]
    run = ways.prepared(model, samples, options.precision, options.engine)
    batches = [((images,), truth) for images, truth in zip(asked, wanted, strict=True)]
    ways.measure(run, batches, "difference", difference)


if __name__ == "__main__":
    main()
