"""The contents of a checkpoint: tensors by name, and everything else as bytes.

``model.NAME`` are weights and buffers, ``optimizer.NAME.KEY`` an optimizer's state of a parameter; NAME is
that of the model without wrappers.  With several models or optimizers, it is ``model1.NAME`` and so on.
``shared`` holds the objects that all ranks have in common, ``rank.N`` those of rank N: pickled Python
objects, as tensors of bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cpulaunch.errors import UsageError
from cpulaunch.runtime.checkpoint.directory import unseen
from cpulaunch.runtime.checkpoint.failures import Damaged, together, why
from cpulaunch.runtime.distributed import unwrap
from cpulaunch.wording import counted

Tensors = dict[str, torch.Tensor]

SHARED = "shared"
_OF_THE_RUN = ("fused", "foreach")
"""Options of optimizers that don't change results: they stay as this run has them."""


def rank_key(rank: int) -> str:
    return f"rank.{rank}"


def collect(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    own: tuple[int, Any],
    shared: Mapping[str, Any],
) -> Tensors:
    """Return everything to save.  ``own`` is this rank's number, and what only this rank holds."""
    tensors = _of_models(models)
    names = _names(models)
    structures = []
    for number, optimizer in enumerate(optimizers):
        structure, found = _of_optimizer(f"optimizer{number or ''}", optimizer, names)
        structures.append(structure)
        tensors.update(found)
    others = {"optimizers": structures, "schedulers": [each.state_dict() for each in schedulers], **shared}
    tensors[SHARED] = _to_bytes(others)
    tensors[rank_key(own[0])] = _to_bytes(own[1])
    return tensors


class Saved:
    """A complete checkpoint, to be loaded by all ranks of ``group``.

    Raises UsageError if it doesn't fit, and Damaged on all ranks if one of them can't read it.
    """

    def __init__(self, path: Path, group: Any) -> None:
        self.path, self._group = path, group
        found = together(self._metadata, group).state_dict_metadata
        self._kept = {name: kept for name, kept in found.items() if isinstance(kept, TensorStorageMetadata)}

    def _metadata(self) -> Metadata:
        """Return torch.distributed.checkpoint's metadata; on rank 0, check it against the files."""
        if not self.path.is_dir():
            raise unseen(self.path.parent)
        try:
            metadata = FileSystemReader(self.path).read_metadata()
        except FileNotFoundError:
            raise Damaged(".metadata is missing") from None
        except Exception as error:
            raise Damaged(f".metadata can't be read: {why(error)}") from None
        ends: dict[str, int] = {}
        if dist.get_rank(self._group) == 0:
            for each in (metadata.storage_data or {}).values():
                end = each.offset + each.length
                ends[each.relative_path] = max(end, ends.get(each.relative_path, 0))
        for name, end in sorted(ends.items()):
            try:
                size = (self.path / name).stat().st_size
            except FileNotFoundError:
                raise Damaged(f"{name} is missing") from None
            if size < end:
                raise Damaged(f"{name} has {size} of {end} bytes")
        return metadata

    def objects(self, rank: int | None) -> tuple[dict[str, Any], Any]:
        """Return the objects that all ranks have in common, and those of ``rank`` (None without one)."""
        return together(lambda: self._objects(rank), self._group)

    def _objects(self, rank: int | None) -> tuple[dict[str, Any], Any]:
        keys = [SHARED, *([] if rank is None else [rank_key(rank)])]
        tensors = {key: torch.empty(self._kept[key].size, dtype=torch.uint8) for key in keys}
        self._read(tensors)
        return _from_bytes(tensors[SHARED]), None if rank is None else _from_bytes(tensors[rank_key(rank)])

    def load(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        shared: Mapping[str, Any],
    ) -> None:
        """Load weights, optimizers and schedulers; ``shared`` is what ``objects`` returned."""
        tensors = _of_models(models)
        self._check_models(tensors)
        parameters = {name: each for model in models for name, each in _named(models, model).items()}
        if len(optimizers) != len(shared["optimizers"]) or len(schedulers) != len(shared["schedulers"]):
            raise self._other(
                f"it holds {_counts(shared['optimizers'], shared['schedulers'])}, and this script has "
                f"{_counts(optimizers, schedulers)}"
            )
        names = _names(models)
        for number, (optimizer, structure) in enumerate(zip(optimizers, shared["optimizers"], strict=True)):
            if (kind := type(optimizer).__name__) != structure["kind"]:
                raise self._other(f"it was saved with {structure['kind']}, and this script has {kind}")
            if _groups(optimizer, names) != [group["params"] for group in structure["groups"]]:
                raise self._other(
                    f"its {type(optimizer).__name__} trains other parameters than this script's"
                )
            prefix = f"optimizer{number or ''}."
            for key in (key for key in self._kept if key.startswith(prefix)):
                name = key[len(prefix) :].rpartition(".")[0]
                tensors[key] = _room(self._kept[key], parameters.get(name))
        together(lambda: self._read(tensors), self._group)
        for number, model in enumerate(models):
            prefix = f"model{number or ''}."
            weights = {key[len(prefix) :]: each for key, each in tensors.items() if key.startswith(prefix)}
            whole = unwrap(model).state_dict()
            whole.update({name: weights[_plain(name)] for name in whole if _plain(name) in weights})
            unwrap(model).load_state_dict(whole)
        for number, (optimizer, structure) in enumerate(zip(optimizers, shared["optimizers"], strict=True)):
            _restore_optimizer(f"optimizer{number or ''}", optimizer, structure, tensors)
        for scheduler, kept in zip(schedulers, shared["schedulers"], strict=True):
            scheduler.load_state_dict(kept)

    def _check_models(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name not in self._kept:
                raise self._other(f"it has no {name.partition('.')[2]}")
            if tensor.shape != self._kept[name].size:
                raise self._other(
                    f"{name.partition('.')[2]} has the shape {_shape(self._kept[name].size)} in it, and "
                    f"{_shape(tensor.shape)} in this script"
                )

    def _other(self, why: str) -> UsageError:
        return UsageError(
            f"{self.path} doesn't fit this script: {why}",
            hint=f"give Checkpoint another directory, or remove {self.path.parent} to start anew",
        )

    def _read(self, tensors: Tensors) -> None:
        load(tensors, storage_reader=FileSystemReader(self.path), process_group=self._group)


def _counts(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> str:
    return f"{counted(len(optimizers), 'optimizer')} and {counted(len(schedulers), 'scheduler')}"


def _shape(size: Sequence[int]) -> str:
    return "×".join(map(str, size)) or "of a number"


def _of_models(models: Sequence[nn.Module]) -> Tensors:
    found: Tensors = {}
    for number, model in enumerate(models):
        # torch's own get_model_state_dict refuses modules of IPEX.
        for name, value in unwrap(model).state_dict().items():
            if isinstance(value, torch.Tensor):  # a module's own extra state may be anything
                found[f"model{number or ''}.{_plain(name)}"] = value.detach()
    return found


def _named(models: Sequence[nn.Module], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters of one of ``models`` by their names in optimizers' states."""
    number = next(n for n, each in enumerate(models) if each is model)
    prefix = f"{number}:" if number else ""
    return {prefix + _plain(name): parameter for name, parameter in unwrap(model).named_parameters()}


def _plain(name: str) -> str:
    """Return a parameter's name without torch.compile's additions."""
    return name.replace("_orig_mod.", "")


def _names(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return ``id`` of a parameter → its name."""
    return {id(each): name for model in models for name, each in _named(models, model).items()}


def _groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of an optimizer's parameters by group."""
    return [
        [names.get(id(parameter), f"group{g}:{p}") for p, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def _of_optimizer(
    prefix: str, optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, Any], Tensors]:
    """Return an optimizer's state: its structure without tensors, and the tensors."""
    kept, groups = optimizer.state_dict(), _groups(optimizer, names)
    by_index = {
        index: name
        for group, own in zip(kept["param_groups"], groups, strict=True)
        for index, name in zip(group["params"], own, strict=True)
    }
    tensors: Tensors = {}
    others: dict[str, dict[str, Any]] = {}
    for index, state in kept["state"].items():
        name = by_index[index]
        others[name] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{prefix}.{name}.{key}"] = value
            else:
                others[name][key] = value
    options = [{**group, "params": own} for group, own in zip(kept["param_groups"], groups, strict=True)]
    return {"kind": type(optimizer).__name__, "groups": options, "state": others}, tensors


def _restore_optimizer(
    prefix: str, optimizer: Optimizer, structure: Mapping[str, Any], tensors: Tensors
) -> None:
    state = {name: dict(others) for name, others in structure["state"].items()}
    start = f"{prefix}."
    for full, tensor in tensors.items():
        if full.startswith(start):
            name, _, key = full[len(start) :].rpartition(".")
            state[name][key] = tensor
    now = optimizer.state_dict()["param_groups"]
    indices = {
        name: index
        for group, kept in zip(now, structure["groups"], strict=True)
        for index, name in zip(group["params"], kept["params"], strict=True)
    }
    groups = [
        {
            **kept,
            **{name: group[name] for name in _OF_THE_RUN if name in group},
            "params": group["params"],
        }
        for group, kept in zip(now, structure["groups"], strict=True)
    ]
    optimizer.load_state_dict(
        {"state": {indices[name]: each for name, each in state.items()}, "param_groups": groups}
    )


def _room(kept: TensorStorageMetadata, parameter: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor to load into, sharded like the parameter that it belongs to, if the shapes match."""
    if isinstance(parameter, DTensor) and parameter.shape == kept.size:
        return torch.zeros_like(parameter, dtype=kept.properties.dtype, requires_grad=False)
    return torch.empty(kept.size, dtype=kept.properties.dtype)


def _to_bytes(thing: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)


def _from_bytes(tensor: torch.Tensor) -> Any:
    return pickle.loads(tensor.numpy().tobytes() if tensor.numel() else b"")
