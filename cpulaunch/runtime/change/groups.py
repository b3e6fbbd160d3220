"""torch's process groups: the planned backend in place of the one that a script names.

A backend's name is an interface: scripts and libraries ask a group for it, and do what they know to be right
for gloo or nccl.  So a group that is of another backend than its script named goes on answering that name.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from cpulaunch.discovery.host.this_host import cpu_flags
from cpulaunch.runtime.change.base import announce, pending_changes
from cpulaunch.runtime.change.precision import check_precision
from cpulaunch.runtime.hooks import replace_everywhere
from cpulaunch.runtime.settings import TrainingSettings

_OF_CPUS = ("gloo", "mpi", "ccl")
"""Backends for CPUs that the planned one takes the place of."""

_DEVICES = {"nccl": "cuda", "xccl": "xpu", **dict.fromkeys(_OF_CPUS, "cpu")}
"""Backend → the device that it is for, where a name says none.

torch takes gloo and ccl for GPUs, too, where it is told no other backend for them.
"""

_UNDEFINED = "undefined"
"""What torch answers for a group that was made without naming a backend."""

_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Group of another backend than its script named → the name that it answers."""


def is_replaced(torch: Any, backend: str | None) -> bool:
    """Whether the planned backend is taken where a script names this one."""
    if backend in (None, _UNDEFINED):
        return True
    pairs = _by_device(backend)
    others = [device for device in pairs if device != "cpu"]
    known = all(name in _DEVICES for name in pairs.values()) and pairs.get("cpu", "ccl") in _OF_CPUS
    return bool(pairs) and known and not any(_is_there(torch, device) for device in others)


def replace_backend(torch: Any, settings: TrainingSettings) -> None:
    """Groups are of the planned backend, and answer the name that the script knows."""
    c10d = torch.distributed.distributed_c10d
    init, new, ask = c10d.init_process_group, c10d.new_group, c10d.get_backend

    def of_all_ranks() -> Any:
        return torch.distributed.group.WORLD

    def remember(group: Any, name: str | None) -> None:
        if name is not None and torch.distributed.get_rank(group) >= 0 and ask(group) != name:
            _names[group] = name

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        check_precision(settings, cpu_flags())
        if not is_replaced(torch, backend):
            return init(backend, *args, **kwargs)
        made = init(settings.backend, *args, **kwargs)
        _announce_group(backend, settings)
        remember(of_all_ranks(), _answer(backend))
        return made

    @functools.wraps(new)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        usual = _name(of_all_ranks())
        name = usual if backend is None else _answer(backend)
        # What the group of all ranks answers stands for the backend that it has.
        same = _of_cpus(backend) == _of_cpus(usual or str(ask()))
        planned = (backend is None or same or _is_of_gpus(backend)) and is_replaced(torch, backend)
        group = new(ranks, timeout, settings.backend if backend and planned else backend, *args, **kwargs)
        if planned:
            remember(group, name)
        return group

    @functools.wraps(ask)
    def get_backend(group: Any = None) -> Any:
        actual = ask(group)
        name = _name(group or of_all_ranks())
        return actual if name is None else torch.distributed.Backend(name)

    for original, replacement in ((init, init_process_group), (new, new_group), (ask, get_backend)):
        replace_everywhere(original, replacement)


def _name(group: Any) -> str | None:
    return None if group is None else _names.get(group)


def _by_device(backend: str) -> dict[str, str]:
    """Device → backend, of a name such as ``gloo`` or ``cpu:gloo,cuda:nccl``; empty if torch refuses it."""
    name = str(backend).lower()
    if name in _DEVICES:
        return {_DEVICES[name]: name}
    pairs = [pair.split(":") for pair in name.split(",")]
    if any(len(pair) != 2 for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        return {}
    return {pair[0]: pair[1] for pair in pairs}


def _of_cpus(backend: str | None) -> str | None:
    """The backend for tensors on the CPU; without a name it is gloo."""
    return "gloo" if backend in (None, _UNDEFINED) else _by_device(str(backend)).get("cpu")


def _is_there(torch: Any, device: str) -> bool:
    """Whether this host has such a device; one that isn't known to be missing may be there."""
    module = getattr(torch, device, None)
    return module is None or not hasattr(module, "is_available") or bool(module.is_available())


def _is_of_gpus(backend: str) -> bool:
    return any(device != "cpu" for device in _by_device(backend))


def _answer(backend: str | None) -> str:
    """What a group answers that was asked for by this name.

    Not one that only a GPU's group has: scripts move tensors to a GPU then.
    """
    if backend in (None, _UNDEFINED):
        return _UNDEFINED
    pairs = _by_device(backend)
    return str(backend).lower() if "cpu" in pairs else "gloo"


def _announce_group(backend: str | None, settings: TrainingSettings) -> None:
    changes = list(pending_changes())
    if settings.backend != _of_cpus(backend):
        changes.insert(0, f"backend {settings.backend}{f' (not {str(backend).lower()})' if backend else ''}")
    announce(*changes)
