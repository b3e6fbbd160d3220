"""What scripts/bench/placement.py lets ranks run: a BERT of 4 layers, random weights, bf16, DDP, AdamW.

Prints the seconds of a step: the median of ``--steps``, after three that are not counted.  ``--anywhere``
gives up the rank's cores, as if nobody had bound it.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification

BATCH, TOKENS, WARM_UP = 8, 128, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--anywhere", action="store_true")
    options = parser.parse_args()
    if options.anywhere:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), range(os.cpu_count() or 1))
    torch.manual_seed(0)
    model: torch.nn.Module = BertForSequenceClassification(BertConfig(num_hidden_layers=4))
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group(os.environ["CPULAUNCH_BACKEND"])
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    words = torch.randint(1000, 30000, (BATCH, TOKENS))
    labels = torch.randint(0, 2, (BATCH,))
    bf16 = os.environ["CPULAUNCH_PRECISION"] == "bf16"
    seconds = []
    for _ in range(WARM_UP + options.steps):
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=words, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    if os.environ["RANK"] == "0":
        print(f"seconds a step: {statistics.median(seconds[WARM_UP:]):.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


main()
