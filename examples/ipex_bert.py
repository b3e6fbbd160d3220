"""``cpulaunch.prepare`` trains a BERT with IPEX in bf16: split weights, fused AdamW.

    pip install 'cpulaunch[intel,hf]'               # torch 2.8 with IPEX 2.8
    cpulaunch run -n 2 --engine ipex examples/ipex_bert.py

Without IPEX, the script trains with the engine native, and rank 0 logs why.  A BERT of 4 layers learns which
of two digits is more frequent in a text of digits.
Expected on 2 ranks of 1 core each: at least 90 % of the test texts are classified correctly within a minute,
and a plain model that loads the fp32 checkpoint has the same accuracy.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import cpulaunch

CONFIG = BertConfig(
    vocab_size=10, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    cpulaunch.init()
    torch.manual_seed(0)
    train, test = data(8192), data(1024)
    model = BertForSequenceClassification(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, loader = cpulaunch.prepare(model, optimizer, loader)

    step, started = 0, time.perf_counter()
    while step < options.steps:
        for texts, labels in loader:
            with cpulaunch.autocast():
                loss = model(input_ids=texts, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if cpulaunch.is_main() and step % 50 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
            if step == options.steps:
                break
    seconds = time.perf_counter() - started

    right = evaluate(model, test)
    weights = cpulaunch.unwrap(model).state_dict()
    plain = BertForSequenceClassification(CONFIG)
    plain.load_state_dict(weights)
    again = evaluate(plain, test)
    if cpulaunch.is_main():
        kinds = ", ".join(sorted({str(tensor.dtype) for tensor in weights.values()}))
        print(f"test accuracy {right:.1%}, {seconds:.1f} s of training; checkpoint of {kinds}: {again:.1%}")


def data(texts: int) -> TensorDataset:
    """Texts of 32 digits without ties; the label is 1 if there are more 7s than 3s, else 0."""
    generator = torch.Generator().manual_seed(texts)
    digits = torch.randint(10, (4 * texts, 32), generator=generator)
    difference = (digits == 7).sum(1) - (digits == 3).sum(1)
    kept = difference != 0
    return TensorDataset(digits[kept][:texts], (difference[kept][:texts] > 0).long())


def evaluate(model: torch.nn.Module, test: TensorDataset) -> float:
    """Test accuracy: each rank evaluates its share, and an allreduce adds up the counts."""
    model.eval()
    texts, labels = (tensor[cpulaunch.rank() :: cpulaunch.world_size()] for tensor in test.tensors)
    with torch.no_grad(), cpulaunch.autocast():
        right = (model(input_ids=texts).logits.argmax(1) == labels).sum()
    counts = torch.stack([right, torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


if __name__ == "__main__":
    main()
