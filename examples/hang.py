"""A job that hangs in its sixth step, because one rank is late; a box names the rank and its line.

    cpulaunch run -n 2 --stall-timeout 5 --stall-action abort examples/hang.py --late 1
    cpulaunch stacks                # in another terminal, while it hangs, without --stall-action

Without --late, it trains for ten steps and ends.
"""

import argparse
import time

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--late", type=int, metavar="RANK", help="the rank that is late")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    is_late = dist.get_rank() == options.late
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(1, 11):
        batch = load_batch(is_late and step == 6)
        (batch @ weight).square().mean().backward()
        dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"{step} steps")
    dist.destroy_process_group()


def load_batch(hangs: bool) -> torch.Tensor:
    if hangs:
        time.sleep(600)
    return torch.randn(32, 1000) / 1000


if __name__ == "__main__":
    main()
