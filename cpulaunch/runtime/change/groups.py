"""torch's process groups: the planned backend in place of the one that a script names.

A backend's name is an interface: scripts and libraries ask a group for it, and do what they consider right
for gloo or nccl.  So a group whose backend was replaced still returns the name that its script gave.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import Table
from cpulaunch.discovery.host.this_host import cpu_flags
from cpulaunch.errors import UsageError
from cpulaunch.runtime.change.base import announce, pending_changes
from cpulaunch.runtime.change.precision import check_precision
from cpulaunch.runtime.hooks import replace_everywhere
from cpulaunch.runtime.settings import TrainingSettings

_OF_CPUS = ("gloo", "mpi", "ccl")
"""CPU backends that the planned one replaces."""

_DEVICES = {"nccl": "cuda", "xccl": "xpu", **dict.fromkeys(_OF_CPUS, "cpu")}
"""Backend → its device, for names without a device.

torch also uses gloo and ccl for GPUs, unless it is given another backend for them.
"""

_UNDEFINED = "undefined"
"""torch's name for the backend of a group that was made without naming one."""

_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Group whose backend was replaced → the name that it returns."""


def is_replaced(torch: Any, backend: str | None) -> bool:
    """Return whether the planned backend replaces this one."""
    if backend in (None, _UNDEFINED):
        return True
    pairs = _by_device(backend)
    others = [device for device in pairs if device != "cpu"]
    known = all(name in _DEVICES for name in pairs.values()) and pairs.get("cpu", "ccl") in _OF_CPUS
    return bool(pairs) and known and not any(_is_there(torch, device) for device in others)


def replace_backend(torch: Any, settings: TrainingSettings) -> None:
    """Make groups of the planned backend, which return the name that the script knows."""
    c10d = torch.distributed.distributed_c10d
    init, new, ask = c10d.init_process_group, c10d.new_group, c10d.get_backend

    restricted = rank_setting(Table.hosts.port_range, os.environ) != "auto"

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
        # A script that names what the group of all ranks answers gets that group's backend.
        same = _of_cpus(backend) == _of_cpus(usual or str(ask()))
        planned = (backend is None or same or _is_of_gpus(backend)) and is_replaced(torch, backend)
        chosen = settings.backend if backend and planned else backend
        if restricted and chosen and _of_cpus(chosen) == "gloo":
            raise UsageError(
                "--port-range is set, and gloo can't keep its ports within a range: "
                f"new_group(backend={backend!r})",
                hint="new_group() without a backend makes a group of ccl",
            )
        group = new(ranks, timeout, chosen, *args, **kwargs)
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
    """Return device → backend for ``gloo`` or ``cpu:gloo,cuda:nccl``; empty if torch refuses the name."""
    name = str(backend).lower()
    if name in _DEVICES:
        return {_DEVICES[name]: name}
    pairs = [pair.split(":") for pair in name.split(",")]
    if any(len(pair) != 2 for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        return {}
    return {pair[0]: pair[1] for pair in pairs}


def _of_cpus(backend: str | None) -> str | None:
    """Return the backend for tensors on the CPU; gloo if there is no name."""
    return "gloo" if backend in (None, _UNDEFINED) else _by_device(str(backend)).get("cpu")


def _is_there(torch: Any, device: str) -> bool:
    """Return whether this host has such a device; True if that can't be determined."""
    module = getattr(torch, device, None)
    return module is None or not hasattr(module, "is_available") or bool(module.is_available())


def _is_of_gpus(backend: str) -> bool:
    return any(device != "cpu" for device in _by_device(backend))


def _answer(backend: str | None) -> str:
    """Return the backend name that a group reports if the script requested it by this name.

    It is never a name that only a GPU's group has: scripts would move tensors to a GPU.
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
