"""``--as-written`` and telemetry leave a script's numbers unchanged, bit for bit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import TIMEOUT, clean_environment
from support.marks import repeat

pytestmark = pytest.mark.slow

# The compiled function computes other numbers than the eager one, so a step that runs eagerly is noticed.
SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader
torch.manual_seed(1)
dist.init_process_group("gloo")
def backend(graph, inputs):
    return lambda *arguments: tuple(each * 1.5 for each in graph.forward(*arguments))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
if "compiled" in sys.argv:
    model = torch.compile(model, backend=backend)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(parallel.parameters(), 0.01)
data = torch.randn(2, 12, 4, 8)[dist.get_rank()]
losses = []
for batch in DataLoader(data, batch_size=None):
    optimizer.zero_grad()
    loss = parallel(batch).square().sum()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
print("LOSSES", torch.get_num_threads(), *losses, flush=True)
dist.destroy_process_group()
"""


def losses(out: str) -> list[list[str]]:
    """Return the number of threads and the losses of each rank, in any order."""
    return sorted(line.partition("LOSSES ")[2].split() for line in out.splitlines() if "LOSSES" in line)


def by_cpulaunch(directory: Path, *options: str, kind: str) -> list[list[str]]:
    command = [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--oversubscribe", "--tee", "all"]
    done = subprocess.run(
        [*command, *options, "script.py", kind], cwd=directory, env=clean_environment(),
        capture_output=True, text=True, timeout=2 * TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def by_itself(directory: Path, threads: str, kind: str) -> list[list[str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py", kind], cwd=directory, stdout=subprocess.PIPE, text=True,
            env=clean_environment(**common, RANK=str(rank)),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=2 * TIMEOUT)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(TIMEOUT)
    return losses("".join(said))


@pytest.mark.parametrize("kind", ["eager", repeat("compiled")])
def test_as_written_gives_the_losses_of_plain_python(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = by_cpulaunch(tmp_path, "--as-written", kind=kind)
    assert len(found) == 2
    assert {len(rank) for rank in found} == {1 + 12}
    assert found == by_itself(tmp_path, found[0][0], kind)
    (file,) = tmp_path.glob("runs/*/telemetry.jsonl")
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [row for row in rows if row.get("rank") == 0 and "step" in row]
    assert steps[-1]["step"] == 12
    assert all(row["seconds"] > 0 for row in steps)
    assert not any({"flops", "samples"} & row.keys() for row in steps)


@pytest.mark.repeats
@pytest.mark.parametrize("kind", ["eager", repeat("compiled")])
def test_telemetry_changes_no_loss(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = "--backend", "gloo", "--precision", "fp32", "--telemetry"
    assert by_cpulaunch(tmp_path, *options, "file", kind=kind) == by_cpulaunch(
        tmp_path, *options, "none", kind=kind
    )
