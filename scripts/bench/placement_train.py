"""The program of scripts/bench/placement.py: an encoder like BERT, of 4 layers, with AdamW and DDP.

Prints the seconds of a step: the median of ``--steps``, after some that are not counted.  ``--anywhere``
removes the rank's binding.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

WORDS, WIDTH, HEADS, LAYERS = 30522, 768, 12, 4
BATCH, TOKENS, WARM_UP = 8, 128, 3


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(words) + self.places.weight)[:, 0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--anywhere", action="store_true")
    options = parser.parse_args()
    if options.anywhere:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), range(os.cpu_count() or 1))
    torch.manual_seed(0)
    model: nn.Module = Encoder()
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group(os.environ["CPULAUNCH_BACKEND"])
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    words = torch.randint(WORDS, (BATCH, TOKENS))
    labels = torch.randint(2, (BATCH,))
    bf16 = os.environ["CPULAUNCH_PRECISION"] == "bf16"
    seconds = []
    for _ in range(WARM_UP + options.steps):
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = nn.functional.cross_entropy(model(words), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    if os.environ["RANK"] == "0":
        print(f"seconds a step: {statistics.median(seconds[WARM_UP:]):.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


main()
