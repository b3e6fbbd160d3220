"""torch's process groups: creates groups of the planned backend instead of the backend that the script names.

``get_backend`` still returns the name that the script gave, because scripts and libraries behave differently
for different names.
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
from cpulaunch.runtime.change import base
from cpulaunch.runtime.change.precision import check_precision
from cpulaunch.runtime.hooks import replace_everywhere
from cpulaunch.runtime.settings import TrainingSettings

_OF_CPUS = ("gloo", "mpi", "ccl")
"""CPU backends that the planned one replaces."""

_DEVICES = {"nccl": "cuda", "xccl": "xpu", **dict.fromkeys(_OF_CPUS, "cpu")}
"""Backend → the device that it is for, if the name has no device."""

_UNDEFINED = "undefined"
"""torch's name of the backend if a script names none."""

_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Group whose backend was replaced → the name that ``get_backend`` returns."""


def is_replaced(torch: Any, backend: str | None) -> bool:
    """Return whether the planned backend replaces ``backend``."""
    if backend in (None, _UNDEFINED):
        return True
    pairs = _by_device(backend)
    others = [device for device in pairs if device != "cpu"]
    known = all(name in _DEVICES for name in pairs.values()) and pairs.get("cpu", "ccl") in _OF_CPUS
    return bool(pairs) and known and not any(_has_device(torch, device) for device in others)


def replace_backend(torch: Any, settings: TrainingSettings) -> None:
    """Replace the functions that create groups, and ``get_backend``."""
    c10d = torch.distributed.distributed_c10d
    init, new, get = c10d.init_process_group, c10d.new_group, c10d.get_backend

    ports_are_restricted = rank_setting(Table.hosts.port_range, os.environ) != "auto"

    def default_group() -> Any:
        return torch.distributed.group.WORLD

    def set_name(group: Any, name: str | None) -> None:
        if name is not None and torch.distributed.get_rank(group) >= 0 and get(group) != name:
            _names[group] = name

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        check_precision(settings, cpu_flags())
        if not is_replaced(torch, backend):
            return init(backend, *args, **kwargs)
        result = init(settings.backend, *args, **kwargs)
        _announce_group(backend, settings)
        set_name(default_group(), _reported_name(backend))
        return result

    @functools.wraps(new)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        default_name = _name(default_group())
        name = default_name if backend is None else _reported_name(backend)
        # If the script names the backend of the default group, the new group gets the same backend.
        same = _cpu_backend(backend) == _cpu_backend(default_name or str(get()))
        planned = (backend is None or same or _is_for_gpus(backend)) and is_replaced(torch, backend)
        used = settings.backend if backend and planned else backend
        if ports_are_restricted and used and _cpu_backend(used) == "gloo":
            raise UsageError(
                "--port-range is set, and gloo can't keep its ports within a range: "
                f"new_group(backend={backend!r})",
                hint="new_group() without a backend makes a group of ccl",
            )
        group = new(ranks, timeout, used, *args, **kwargs)
        if planned:
            set_name(group, name)
        return group

    @functools.wraps(get)
    def get_backend(group: Any = None) -> Any:
        actual = get(group)
        name = _name(group or default_group())
        return actual if name is None else torch.distributed.Backend(name)

    for original, replacement in ((init, init_process_group), (new, new_group), (get, get_backend)):
        replace_everywhere(original, replacement)


def _name(group: Any) -> str | None:
    return None if group is None else _names.get(group)


def _by_device(backend: str) -> dict[str, str]:
    """Return device → backend for ``gloo`` or ``cpu:gloo,cuda:nccl``; empty if the name is invalid."""
    name = str(backend).lower()
    if name in _DEVICES:
        return {_DEVICES[name]: name}
    pairs = [pair.split(":") for pair in name.split(",")]
    if any(len(pair) != 2 for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        return {}
    return {pair[0]: pair[1] for pair in pairs}


def _cpu_backend(backend: str | None) -> str | None:
    """Return the backend for tensors on the CPU; gloo if the script names none."""
    return "gloo" if backend in (None, _UNDEFINED) else _by_device(str(backend)).get("cpu")


def _has_device(torch: Any, device: str) -> bool:
    """Return whether this host has a device of this type; True if this is unknown."""
    module = getattr(torch, device, None)
    return module is None or not hasattr(module, "is_available") or bool(module.is_available())


def _is_for_gpus(backend: str) -> bool:
    return any(device != "cpu" for device in _by_device(backend))


def _reported_name(backend: str | None) -> str:
    """Return the name that ``get_backend`` returns for a group that the script created with ``backend``.

    For a backend of GPUs, it is gloo, because scripts would move tensors to a GPU.
    """
    if backend in (None, _UNDEFINED):
        return _UNDEFINED
    pairs = _by_device(backend)
    return str(backend).lower() if "cpu" in pairs else "gloo"


def _announce_group(backend: str | None, settings: TrainingSettings) -> None:
    changes = base.with_group[:]
    if settings.backend != _cpu_backend(backend):
        changes.insert(0, f"backend {settings.backend}{f' (not {str(backend).lower()})' if backend else ''}")
    base.announce(*changes)
