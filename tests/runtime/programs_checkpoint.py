"""Programs that save and resume: ``programs_checkpoint.py NAME ARGS``, on one rank or several.

Each prints what it found as ``RESULT {…}``.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import cpulaunch
from cpulaunch.errors import UsageError
from cpulaunch.runtime.checkpoint import lock


class Noisy(Dataset):
    """Examples that draw from all three sources of random numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        return torch.full((8,), index / 40) + torch.randn(8) + noise


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return (torch.full((8,), number / 40) + torch.randn(8) for number in range(40))


class Stateful(DataLoader):
    """A loader that keeps its position itself, as torchdata's does."""

    taken = skip = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["taken"]

    def __iter__(self) -> Any:
        batches, start, self.skip = super().__iter__(), self.skip, 0
        for _ in range(start):
            next(batches)
        return self._counted(batches, start)

    def _counted(self, batches: Any, start: int) -> Any:
        for self.taken, batch in enumerate(batches, start + 1):
            yield batch


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))


def digest(module: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in module.state_dict().values():
        value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(value.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def train(directory: str, loader: Any, steps: int, **options: Any) -> tuple[str, list[int]]:
    """Train to step ``steps``, resuming if possible; return the digest of the weights, and the steps that
    this call made."""
    seed = options.pop("seed", 0)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = network()
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    if dist.is_initialized() and dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    checkpoint = cpulaunch.Checkpoint(
        directory, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, **options
    )
    done = []
    for _, step, batch in checkpoint.steps(loader, epochs=4):
        if step == steps:
            break
        loss = model(batch).square().mean() * (1 + random.random() + float(np.random.rand()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        done.append(step)
        checkpoint.save_if_due()
    checkpoint.wait()
    return digest(cpulaunch.unwrap(model)), done


def loaders() -> dict[str, Any]:
    """Kinds of loaders, each of 10 batches (the stream's of two workers: 20)."""

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    return {
        "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
        "own generator": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=generator()),
        "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
        "stream": lambda: DataLoader(Stream(), 4),
        "stateful": lambda: Stateful(Noisy(), 4),
        "distributed sampler": lambda: DataLoader(
            Noisy(), 4, sampler=DistributedSampler(Noisy(), num_replicas=1, rank=0)
        ),
        "list": lambda: list(torch.randn(10, 4, 8, generator=generator())),
    }


def continued() -> dict[str, Any]:
    """Train for 25 steps with each kind of loader: at once, and resumed within and at the end of an epoch."""
    found = {}
    for name, make in loaders().items():
        whole, _ = train(f"{name}-whole", make(), 25)
        for part, (first, last) in {"middle": (13, 25), "end": (10, 25)}.items():
            directory = f"{name}-{part}"
            train(directory, make(), first, every=first)
            parts, done = train(directory, make(), last, seed=9)
            found[f"{name}, {part}"] = [parts == whole, done[0]]
    whole, _ = train("sgd-whole", loaders()["shuffled"](), 25, optimizer=torch.optim.SGD)
    train("sgd", loaders()["shuffled"](), 13, optimizer=torch.optim.SGD, every=13)
    parts, done = train("sgd", loaders()["shuffled"](), 25, optimizer=torch.optim.SGD)
    found["SGD"] = [parts == whole, done[0]]
    whole, _ = train("finished", loaders()["list"](), 99, every=40)
    again, done = train("finished", loaders()["list"](), 99)
    found["finished"] = [again == whole, len(done)]
    return found


def killed(directory: str, *points: str) -> dict[str, Any]:
    """Train in processes that are killed, one at each point, and then to the end; what each has left."""
    left = {}
    for point in points:
        if (child := os.fork()) == 0:
            train_until(directory, point)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, point
        left[point] = sorted(path.name for path in Path(directory).glob("step-*") if path.suffix == "")
    return {**train_until(directory), **({"left": left} if left else {})}


def train_until(directory: str, point: str = "") -> dict[str, Any]:
    """Train for 38 steps with a save every 5 steps; ``point`` (WHEN-STEP) names the moment of the kill."""
    where, _, step = point.partition("-")
    rename, fsync, rmtree = os.rename, os.fsync, shutil.rmtree
    die = f"step-{step}"

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def own_rename(source: Any, target: Any) -> None:
        if where == "before" and str(target).endswith(die):
            kill()
        rename(source, target)
        if where == "after" and str(target).endswith(die):
            kill()

    def own_fsync(fd: int) -> None:
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == 19  # in the thread that writes
        if where == "writing" and f"{die}.partial" in os.readlink(f"/proc/self/fd/{fd}"):
            kill()
        fsync(fd)

    def own_rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        if where == "removing" and str(path).endswith(f"{die}.old") and Path(path).exists():
            (Path(path) / ".metadata").unlink()
            kill()
        rmtree(path, *args, **kwargs)

    os.rename, os.fsync, shutil.rmtree = own_rename, own_fsync, own_rmtree
    weights, done = train(directory, loaders()["shuffled"](), 38, every=5)
    return {"weights": weights, "first": done[0]}


def full(directory: str) -> dict[str, Any]:
    """The disk is full for the saves of steps 10 and 15, and has space again for that of step 20."""
    filler = Path(directory, "filler")
    loader, model = loaders()["shuffled"](), network()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = cpulaunch.Checkpoint(directory, model=model, optimizer=optimizer, every=5)
    complete = {}
    for _, step, batch in checkpoint.steps(loader, epochs=3):
        model(batch).mean().backward()
        optimizer.step()
        checkpoint.save_if_due()
        checkpoint.wait()
        complete[step + 1] = sorted(path.name for path in Path(directory).glob("step-*"))
        if step + 1 == 5:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        elif step + 1 == 19:
            filler.unlink()
    return {str(step): complete[step] for step in (5, 10, 15, 20)}


def damaged(directory: str) -> dict[str, Any]:
    """Resume from copies of a directory with checkpoints of steps 1 to 4, each copy damaged in another way.

    Returns the resumed step, whether the weights are those of that step, and the remaining files; or the
    error.
    """
    cpulaunch.init()
    first, last = cpulaunch.rank() == 0, f"__{cpulaunch.world_size() - 1}_0.distcp"

    def make(where: str) -> tuple[nn.Module, Any, Any]:
        model: nn.Module = nn.Linear(8, 4)
        if dist.get_world_size() > 1:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        checkpoint = cpulaunch.Checkpoint(where, model=model, optimizer=optimizer, every=1, keep=9)
        return model, optimizer, checkpoint

    model, optimizer, checkpoint = make(directory)
    weights = []
    for _ in range(checkpoint.resume(), 4):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        checkpoint.save_if_due()
        weights.append(digest(cpulaunch.unwrap(model)))
    checkpoint.wait()

    def halve(file: Path) -> None:
        os.truncate(file, file.stat().st_size // 2)

    def garble(file: Path) -> None:
        file.write_bytes(b"x" * file.stat().st_size)

    kinds: dict[str, list[tuple[int, str, Any]]] = {
        "data truncated": [(4, last, halve)],
        "data missing": [(4, last, Path.unlink)],
        "data garbled": [(4, last, garble)],
        "facts missing": [(4, "checkpoint.json", Path.unlink)],
        "facts truncated": [(4, "checkpoint.json", halve)],
        "metadata missing": [(4, ".metadata", Path.unlink)],
        "metadata truncated": [(4, ".metadata", halve)],
        "two": [(4, last, halve), (3, ".metadata", Path.unlink)],
        "all": [(step, "checkpoint.json", Path.unlink) for step in (1, 2, 3, 4)],
    }
    found: dict[str, Any] = {}
    for name, wrong in kinds.items():
        where = Path(name.replace(" ", "-"))
        if first:
            shutil.copytree(directory, where)
            for step, file, how in wrong:
                how(where / f"step-{step}" / file)
        dist.barrier()
        model, _, checkpoint = make(str(where))
        try:
            step = checkpoint.resume()
        except UsageError as error:
            found[name] = [str(error), error.hint]
            continue
        same = digest(cpulaunch.unwrap(model)) == weights[step - 1]
        dist.barrier()
        found[name] = [step, same, sorted(path.name for path in where.glob("step-*"))]
    return found


def sharded(directory: str) -> dict[str, Any]:
    """Save a model sharded by FSDP2, and load it into a new model."""
    from torch.distributed.fsdp import fully_shard

    cpulaunch.init()

    def make() -> tuple[nn.Module, Any, Any]:
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 5))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, cpulaunch.Checkpoint(directory, model=model, optimizer=optimizer, every=3)

    def steps(model: nn.Module, optimizer: Any, checkpoint: Any, last: int) -> None:
        generator = torch.Generator().manual_seed(cpulaunch.rank())
        data = torch.randn(8, 4, 8, generator=generator)
        for step in range(checkpoint.resume(), last):
            model(data[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.save_if_due()
        checkpoint.wait()

    torch.manual_seed(1)
    first = make()
    steps(*first, last=3)
    steps(*first, last=6)  # its second save is at step 6
    torch.manual_seed(2)
    second = make()
    before = digest(second[0])
    loaded = second[2].resume()
    return {
        "step": loaded,
        "same": digest(second[0]) == digest(first[0]) != before,
        "state": [str(type(value).__name__) for value in next(iter(second[1].state.values())).values()],
        "equal": all(
            torch.equal(one.to_local(), other.to_local())
            for mine, theirs in zip(second[1].state.values(), first[1].state.values(), strict=True)
            for one, other in [(mine["exp_avg_sq"], theirs["exp_avg_sq"])]
        ),
    }


def engines(directory: str, last: str) -> dict[str, Any]:
    """Train a convolution and a layer with the job's engine, from the last checkpoint to step ``last``."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32), nn.Linear(32, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = cpulaunch.prepare(model, optimizer)
    checkpoint = cpulaunch.Checkpoint(directory, model=model, optimizer=optimizer, every=5)
    first = checkpoint.resume()
    generator = torch.Generator().manual_seed(4)
    data, labels = torch.randn(40, 8, 3, 8, 8, generator=generator), torch.arange(8) % 4
    losses = []
    for step in range(first, int(last)):
        with cpulaunch.autocast():
            loss = nn.functional.cross_entropy(model(data[step % 4]).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        checkpoint.save_if_due()
    checkpoint.wait()
    return {"first": first, "losses": losses}


def job(directory: str, steps: str) -> dict[str, Any]:
    """Train by DDP on each rank's share of the data."""
    cpulaunch.init()
    sampler = DistributedSampler(Noisy())
    loader = DataLoader(Noisy(), 2, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = cpulaunch.Checkpoint(directory, model=model, optimizer=optimizer, loader=loader, every=5)
    done = []
    print(f"pid {os.getpid()}", flush=True)
    for epoch, step, batch in checkpoint.steps(loader, epochs=int(steps)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done.append((epoch, step))
        checkpoint.save_if_due()
    return {"first": done[:1], "last": done[-1:]}


def stuck(directory: str) -> None:
    """The second rank leaves the others alone in a collective after step 5."""
    cpulaunch.init()
    model = nn.Linear(8, 4)
    checkpoint = cpulaunch.Checkpoint(directory, model=model, every=5)
    for step in range(checkpoint.resume(), 6):
        if step == 5:
            checkpoint.wait()
            print("stuck", flush=True)
            if cpulaunch.rank() == 1:
                threading.Event().wait()
            dist.barrier()
        checkpoint.save_if_due()


def refused(directory: str) -> dict[str, Any]:
    """Load checkpoints that don't fit; return the messages."""
    model = network()
    checkpoint = cpulaunch.Checkpoint(directory, model=model, every=1)
    checkpoint.resume()
    checkpoint.save_if_due()
    checkpoint.wait()
    sgd, adam = (kind(model.parameters()) for kind in (torch.optim.SGD, torch.optim.AdamW))
    other = cpulaunch.Checkpoint("other", model=model, optimizer=sgd)
    other.resume()
    model(torch.randn(4, 8)).sum().backward()
    sgd.step()
    Path("file").write_text("")
    wrong: dict[str, Any] = {
        "every": lambda: cpulaunch.Checkpoint(directory, model=model, every="often"),
        "keep": lambda: cpulaunch.Checkpoint(directory, model=model, keep=0),
        "scheduler": lambda: cpulaunch.Checkpoint(directory, model=model, scheduler="step"),
        "optimizer": lambda: cpulaunch.Checkpoint(directory, model=model, optimizer=[model]),
        "loader": lambda: next(cpulaunch.Checkpoint(directory, model=model).steps(epochs=3)),
        "directory": lambda: cpulaunch.Checkpoint("file/below", model=model),
        "file": lambda: cpulaunch.Checkpoint("file", model=model),
        "no directory": lambda: cpulaunch.Checkpoint("", model=model),
        "no model": lambda: cpulaunch.Checkpoint(directory, model=None),
        "no loader": lambda: cpulaunch.Checkpoint(directory, model=model, loader=3),
        "epochs": lambda: next(cpulaunch.Checkpoint(directory, model=model).steps([], epochs=-1)),
        "which step": other.save,
        "another optimizer": lambda: (
            other.save(step=5),
            other.wait(),
            cpulaunch.Checkpoint("other", model=model, optimizer=adam).resume(),
        ),
        "names": lambda: cpulaunch.Checkpoint(directory, model=nn.Linear(8, 8)).resume(),
        "shapes": lambda: cpulaunch.Checkpoint(
            directory, model=nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Dropout(), nn.Linear(9, 1))
        ).resume(),
        "optimizers": lambda: cpulaunch.Checkpoint(
            directory, model=network(), optimizer=torch.optim.SGD(network().parameters())
        ).resume(),
    }
    said = {}
    for name, call in wrong.items():
        try:
            call()
        except UsageError as error:
            said[name] = [str(error), error.hint]
    Path(directory, "step-1", "checkpoint.json").write_text('{"schema": 0}')
    try:
        cpulaunch.Checkpoint(directory, model=model).resume()
    except UsageError as error:
        said["version"] = [str(error), error.hint]
    return said


def gone(directory: str) -> dict[str, Any]:
    """A file replaces the directory before the second save."""
    model = network()
    checkpoint = cpulaunch.Checkpoint(directory, model=model)
    checkpoint.resume()
    checkpoint.save(step=1)
    checkpoint.wait()
    shutil.rmtree(directory)
    Path(directory).write_text("")
    checkpoint.save(step=2)
    checkpoint.wait()
    return {}


def unread(directory: str) -> dict[str, Any]:
    """Save in two programs.  The second doesn't resume from the checkpoint of the first."""
    for _ in range(2):
        checkpoint = cpulaunch.Checkpoint(directory, model=network())
        for step in (1, 2):
            checkpoint.save(step=step)
        checkpoint.wait()
    return {}


def holds(directory: str) -> dict[str, Any]:
    cpulaunch.Checkpoint(directory, model=network()).resume()
    print("holds", flush=True)
    sys.stdin.read()
    return {}


def refused_lock(directory: str) -> dict[str, Any]:
    """The message about a directory that another job may use, without waiting."""
    lock.PATIENCE = 0.0
    try:
        cpulaunch.Checkpoint(directory, model=network()).resume()
    except UsageError as error:
        return {"error": str(error), "hint": error.hint}
    return {"error": "", "hint": ""}


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print("RESULT", json.dumps(globals()[name](*arguments)), flush=True)
