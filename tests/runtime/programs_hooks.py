"""Two ranks of a small job for each given name of torch, which is renamed before cpulaunch is loaded.

``programs_hooks.py NAME…`` prints a JSON object: name → exit codes, and the lines of both ranks on stderr.
torch is imported once, and each job is two forks of this process.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from cpulaunch import ledger, variables
from cpulaunch.runtime.observe import tracing
from cpulaunch.runtime.observe.ledger import Observers

OF_TRACES = {name for change in tracing.CHANGES for name in change.needs}


@contextlib.contextmanager
def renamed(name: str) -> Iterator[None]:
    """Rename a name of torch.

    A class would still inherit a renamed attribute, so then the class itself is renamed.
    """
    if not name:
        yield
        return
    place, _, last = name.rpartition(".")
    owner = sys.modules.get(f"torch.{place}") or (attrgetter(place)(torch) if place else torch)
    if last not in vars(owner):  # an attribute of an instance
        owner = type(owner)
    value = vars(owner)[last]
    delattr(owner, last)
    if hasattr(owner, last):
        setattr(owner, last, value)
        with renamed(place):
            yield
        return
    try:
        yield
    finally:
        if last not in vars(owner):
            setattr(owner, last, value)


def with_renamed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``original`` so that it runs while ``name`` is renamed."""

    def call(*args: Any) -> Any:
        with renamed(name):
            return original(*args)

    return call


def rank(number: int, port: int, name: str) -> None:
    os.environ.update({
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        variables.JOB_ID: "j", variables.BACKEND: "gloo", variables.PRECISION: "fp32",
    })  # fmt: skip
    ledger.of_this_process = mmap.mmap(-1, ledger.SIZE)
    for kind, method in ((Observers, "add_group"), (tracing.Tracer, "_start")):
        setattr(kind, method, with_renamed(name, getattr(kind, method)))
    with renamed(name):
        torch._import_device_backends()  # as `import torch` does at its end
    with tempfile.TemporaryDirectory() as directory:
        if name in OF_TRACES:
            ledger.request_trace(ledger.of_this_process, ledger.TraceRequest(1, 2, 3, directory))
        train()


def train() -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in DataLoader(torch.ones(8, 4), 2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    dist.broadcast(total, 0)
    if dist.get_rank() == 0:
        dist.send(total, 1)
    else:
        dist.recv(total, 0)
    dist.monitored_barrier()
    dist.destroy_process_group()
    assert total.item() == 2


def job(name: str) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+") as errors:
        pids = []
        for number in range(2):
            if (pid := os.fork()) == 0:
                os.dup2(errors.fileno(), 2)
                code = 1
                try:
                    rank(number, port, name)
                    code = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        errors.seek(0)
        return {"codes": codes, "lines": errors.read().splitlines()}


if __name__ == "__main__":
    import cpulaunch.runtime.change.torch
    import cpulaunch.runtime.install
    import cpulaunch.runtime.observe.groups  # noqa: F401

    print(json.dumps({name: job(name) for name in sys.argv[1:]}))
