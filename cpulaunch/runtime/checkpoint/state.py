"""The contents of a checkpoint: a dictionary of tensors.

``model.NAME`` is a parameter or buffer, and ``optimizer.NAME.KEY`` an optimizer's state of a parameter.  NAME
is the name in the model without wrappers.  The second model is ``model1``, the second optimizer
``optimizer1``.  ``shared`` has the objects that all ranks share, and ``rank.N`` the objects of rank N, both
pickled into a tensor of bytes.
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
from cpulaunch.runtime.checkpoint.directory import not_shared_error
from cpulaunch.runtime.checkpoint.failures import Damaged, on_all_ranks, reason
from cpulaunch.runtime.distributed import unwrap
from cpulaunch.wording import counted

Tensors = dict[str, torch.Tensor]

SHARED = "shared"
_NOT_RESTORED = ("fused", "foreach")
"""Options of optimizers that don't change results; loading a checkpoint keeps this run's values."""


def rank_key(rank: int) -> str:
    return f"rank.{rank}"


def collect(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    own: tuple[int, Any],
    shared: Mapping[str, Any],
) -> Tensors:
    """Return the tensors to save.  ``own``: this rank's number, and its own objects."""
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
    """A complete checkpoint, which all ranks of ``group`` load.

    Raises UsageError if it doesn't fit the script, and Damaged on all ranks if any rank can't read it.
    """

    def __init__(self, path: Path, group: Any) -> None:
        self.path, self._group = path, group
        found = on_all_ranks(self._metadata, group).state_dict_metadata
        self._saved = {name: each for name, each in found.items() if isinstance(each, TensorStorageMetadata)}

    def _metadata(self) -> Metadata:
        """Return the metadata; on rank 0, check the sizes of the files."""
        if not self.path.is_dir():
            raise not_shared_error(self.path.parent)
        try:
            metadata = FileSystemReader(self.path).read_metadata()
        except FileNotFoundError:
            raise Damaged(".metadata is missing") from None
        except Exception as error:
            raise Damaged(f".metadata can't be read: {reason(error)}") from None
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
        """Return the objects that all ranks share, and ``rank``'s own objects; None if ``rank`` is None."""
        return on_all_ranks(lambda: self._objects(rank), self._group)

    def _objects(self, rank: int | None) -> tuple[dict[str, Any], Any]:
        keys = [SHARED, *([] if rank is None else [rank_key(rank)])]
        tensors = {key: torch.empty(self._saved[key].size, dtype=torch.uint8) for key in keys}
        self._read(tensors)
        return _from_bytes(tensors[SHARED]), None if rank is None else _from_bytes(tensors[rank_key(rank)])

    def load(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        shared: Mapping[str, Any],
    ) -> None:
        """Load weights, optimizers and schedulers; ``shared``: the objects that all ranks share."""
        tensors = _of_models(models)
        self._check_models(tensors)
        parameters = {name: each for model in models for name, each in _named(models, model).items()}
        if len(optimizers) != len(shared["optimizers"]) or len(schedulers) != len(shared["schedulers"]):
            raise self._mismatch(
                f"it holds {_counts(shared['optimizers'], shared['schedulers'])}, and this script has "
                f"{_counts(optimizers, schedulers)}"
            )
        names = _names(models)
        for number, (optimizer, structure) in enumerate(zip(optimizers, shared["optimizers"], strict=True)):
            if (kind := type(optimizer).__name__) != structure["kind"]:
                raise self._mismatch(f"it was saved with {structure['kind']}, and this script has {kind}")
            if _groups(optimizer, names) != [group["params"] for group in structure["groups"]]:
                raise self._mismatch(f"its {kind} trains other parameters than this script's")
            prefix = f"optimizer{number or ''}."
            for key in (key for key in self._saved if key.startswith(prefix)):
                name = key[len(prefix) :].rpartition(".")[0]
                tensors[key] = _empty(self._saved[key], parameters.get(name))
        on_all_ranks(lambda: self._read(tensors), self._group)
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
            if name not in self._saved:
                raise self._mismatch(f"it has no {name.partition('.')[2]}")
            if tensor.shape != self._saved[name].size:
                raise self._mismatch(
                    f"{name.partition('.')[2]} has the shape {_shape(self._saved[name].size)} in it, and "
                    f"{_shape(tensor.shape)} in this script"
                )

    def _mismatch(self, difference: str) -> UsageError:
        return UsageError(
            f"{self.path} doesn't fit this script: {difference}",
            hint=f"use another directory, or remove {self.path.parent} to start from the beginning",
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
        # torch's get_model_state_dict doesn't accept modules of IPEX.
        for name, value in unwrap(model).state_dict().items():
            if isinstance(value, torch.Tensor):  # a module's extra state may be another object
                found[f"model{number or ''}.{_plain(name)}"] = value.detach()
    return found


def _named(models: Sequence[nn.Module], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name → parameter of ``model``; names begin with the model's number unless it is the first."""
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
    """Return the names of the parameters in each parameter group."""
    return [
        [names.get(id(parameter), f"group{g}:{p}") for p, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def _of_optimizer(
    prefix: str, optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, Any], Tensors]:
    """Return an optimizer's state as a structure without tensors, and the tensors."""
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
            **{name: group[name] for name in _NOT_RESTORED if name in group},
            "params": group["params"],
        }
        for group, kept in zip(now, structure["groups"], strict=True)
    ]
    optimizer.load_state_dict(
        {"state": {indices[name]: each for name, each in state.items()}, "param_groups": groups}
    )


def _empty(saved: TensorStorageMetadata, parameter: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor to load into; it is sharded like its parameter if it has the same shape."""
    if isinstance(parameter, DTensor) and parameter.shape == saved.size:
        return torch.zeros_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _to_bytes(thing: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)


def _from_bytes(tensor: torch.Tensor) -> Any:
    return pickle.loads(tensor.numpy().tobytes() if tensor.numel() else b"")
