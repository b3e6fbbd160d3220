"""The group works with Intel's extension, on the last torch that the extension supports.

One source serves both versions of torch.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ranks import run_script
from support.command import intel_python
from support.marks import repeat

pytestmark = pytest.mark.slow

STEPS = """
import torch, torch.distributed as dist, intel_extension_for_pytorch as ipex
assert torch.__version__.startswith("2.8.") and ipex.__version__.startswith("2.8.")
dist.init_process_group("ccl")
rank, size = dist.get_rank(), dist.get_world_size()
"""

COLLECTIVES = """
for kind in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
    x = torch.full((1000,), rank + 1).to(kind)
    dist.all_reduce(x)
    assert (x == torch.tensor(sum(range(1, size + 1))).to(kind)).all(), kind
rows = torch.zeros(size, 3)
dist.all_gather_into_tensor(rows, torch.full((3,), float(rank)))
assert rows[:, 0].tolist() == [float(r) for r in range(size)]
swapped = torch.zeros(size)
dist.all_to_all_single(swapped, torch.arange(size) + 10.0 * rank)
assert swapped.tolist() == [10.0 * r + rank for r in range(size)]
work = dist.all_reduce(x.int(), async_op=True)
work.wait()
group = dist.new_group([1])
part = torch.ones(1)
if rank == 1:
    dist.all_reduce(part, group=group)
    dist.destroy_process_group(group)
named = [None] * size
dist.all_gather_object(named, f"rank {rank}")
assert named == [f"rank {r}" for r in range(size)]
if rank == 0:
    dist.send(torch.ones(2), 1)
elif rank == 1:
    dist.recv(torch.zeros(2), 0)
dist.barrier()
print("collectives agree")
dist.destroy_process_group()
"""

TRAIN = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
prepack = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # IPEX refuses to prepack without bf16 instructions
model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16, weights_prepack=prepack)
model = torch.nn.parallel.DistributedDataParallel(model)
torch.manual_seed(rank)
x, y = torch.randn(32, 64), torch.randint(0, 8, (32,))
losses = []
for _ in range(20):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x).float(), y)
    loss.backward()
    optimizer.step()
    dist.all_reduce(mean := loss.detach().clone(), dist.ReduceOp.AVG)
    losses.append(mean.item())
weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
every = [torch.empty_like(weights) for _ in range(size)]
dist.all_gather(every, weights)
assert all(torch.equal(one, weights) for one in every), "the ranks' weights differ"
assert losses[-1] < 0.8 * losses[0], losses
print("trained")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def intel() -> str:
    """The Python with torch 2.8 and Intel's extension, with the group built for it."""
    python = intel_python()
    build = subprocess.run(
        [python.with_name("cpulaunch"), "ccl", "build"], capture_output=True, text=True, timeout=600
    )
    assert build.returncode == 0, build.stderr
    return str(python)


@pytest.mark.parametrize(
    ("steps", "printed"),
    [repeat(COLLECTIVES, "collectives agree"), (TRAIN, "trained")],
    ids=["collectives", "DDP"],
)
def test_ccl_works_with_intels_extension(intel: str, steps: str, printed: str) -> None:
    for result in run_script(2, STEPS + steps, python=intel, limit=180):
        assert result.returncode == 0, result.stderr
        assert printed in result.stdout


def test_the_build_names_its_version_of_torch(intel: str) -> None:
    done = subprocess.run(
        [Path(intel).with_name("cpulaunch"), "ccl", "info"], capture_output=True, text=True, timeout=60
    )
    used = next(line for line in done.stdout.splitlines() if line.startswith("used for ccl"))
    assert "/torch-2.8-" in used
