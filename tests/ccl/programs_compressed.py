"""Test programs for averages that are sent between hosts as bfloat16."""

from __future__ import annotations

import torch
import torch.distributed as dist
from programs import Groups

from cpulaunch.ccl.meeting import Peer

LENGTHS = (1, 5_000, 65_539, 1_000_003)


def compressed_averages() -> str:
    """Averages of random numbers, several in flight, have the same bits as if torch rounds the sum of each
    host and the total."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, Peer.this_process().host)
    backend = Groups.ccl._get_backend(torch.device("cpu"))
    assert backend.compressing_hosts == len(set(hosts))
    torch.manual_seed(rank)
    tensors = [torch.randn(length) for length in LENGTHS]
    expected = [expected_average(tensor, hosts) for tensor in tensors]
    works = [backend.average_compressed(tensor) for tensor in tensors]
    for tensor, work, wanted in zip(reversed(tensors), reversed(works), reversed(expected), strict=True):
        work.wait()
        (result,) = work.get_future().wait()
        assert result.data_ptr() == tensor.data_ptr()
        assert torch.equal(tensor, wanted), len(tensor)
    return "ok"


def expected_average(tensor: torch.Tensor, hosts: list[str]) -> torch.Tensor:
    everyone = [torch.empty_like(tensor) for _ in hosts]
    dist.all_gather(everyone, tensor)
    sums: dict[str, torch.Tensor] = {}
    for host, one in zip(hosts, everyone, strict=True):
        sums[host] = sums[host] + one if host in sums else one
    if len(sums) == 1:
        return sums[hosts[0]] / len(hosts)
    first, *others = (one.bfloat16().float() for one in sums.values())
    for other in others:
        first += other
    return first.bfloat16().float() / len(hosts)


def exact_averages() -> str:
    """Averages aren't compressed, and thus exact, for types other than float32 and with other transports."""
    backend = Groups.ccl._get_backend(torch.device("cpu"))
    others = (torch.float64, torch.bfloat16, torch.float16, torch.int32)
    for kind in others if backend.compressing_hosts > 1 else (*others, torch.float32):
        torch.manual_seed(dist.get_rank())
        most = 60 if kind is torch.bfloat16 else 500  # so that sums of four numbers are exact in any order
        tensor = torch.randint(-most, most + 1, (100_003,)).to(kind)
        wanted = tensor.clone()
        dist.all_reduce(wanted, dist.ReduceOp.AVG)
        backend.average_compressed(tensor).wait()
        assert torch.equal(tensor, wanted), kind
    return "ok"
