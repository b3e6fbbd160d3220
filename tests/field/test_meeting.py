"""The rendezvous of ranks: the default group made again, wrong rank numbers, and invalid interface names."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Run
from support.marks import repeat

OPTIONS = ("run", "-n", "2", "--oversubscribe", "--precision", "fp32")

# Rank 0 destroys each group after rank 1 has begun to make the next group.
AGAIN = """
import os, sys, time
import torch, torch.distributed as dist
for number in range(3):
    dist.init_process_group(*sys.argv[1:])
    total = torch.ones(1)
    dist.all_reduce(total)
    print("group", number, "of", int(total), flush=True)
    if os.environ["RANK"] == "0":
        time.sleep(1)
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("ccl", ""),
        ("gloo", "ccl"),
        *(repeat(*each) for each in (("ccl", "ccl"), ("ccl", "gloo"), ("gloo", "gloo"), ("gloo", ""))),
    ],
)
def test_the_default_group_can_be_destroyed_and_made_again(
    name: str, backend: str, cpulaunch: Run, built, tmp_path: Path
) -> None:
    (tmp_path / "again.py").write_text(AGAIN)
    done = cpulaunch(*OPTIONS, "--backend", backend, "again.py", *filter(None, [name]))
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"group {number} of 2") for number in range(3)] == [2, 2, 2]
    assert "recvBytes" not in done.stderr  # torch prints this if the store has ended


ALL_RANK_0 = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=2)
"""


@pytest.mark.parametrize("method", ["env://", "tcp://127.0.0.1:29631"])
def test_a_rank_to_which_the_script_gives_the_number_0_is_named(
    method: str, cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "zero.py").write_text(ALL_RANK_0)
    done = cpulaunch(*OPTIONS, "--stall-timeout", "5", "--stall-action", "abort", "zero.py", method)
    assert done.returncode
    assert "this is rank 1 of the job, but the script passes rank=0 and world_size=2" in done.stderr


@pytest.mark.parametrize(
    ("text", "word"),
    [("^lo,docker0", "^lo"), ("=eth0", "=eth0"), ("10.0.0.1", "10.0.0.1"), ("eth0,fe80::1", "fe80::1")],
)
def test_an_interface_that_is_a_pattern_or_an_address_is_an_error(
    text: str, word: str, cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    options = ("--dry-run", "--backend", "gloo", "train.py")
    done = cpulaunch(*OPTIONS, *options, env={"GLOO_SOCKET_IFNAME": text})
    assert done.returncode == 2
    assert f"$GLOO_SOCKET_IFNAME: {text}: {word} is not the name of an interface" in done.stderr
    assert cpulaunch(*OPTIONS, *options, env={"GLOO_SOCKET_IFNAME": "eth0,eth1"}).returncode == 0
