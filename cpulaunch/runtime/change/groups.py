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

_OF_CPUS = (None, "gloo", "mpi", "ccl", "cpu:gloo")
_OF_GPUS = ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl")  # sorted by device

_GLOO = {None: "gloo", "cpu:gloo": "gloo"}
"""Names by which torch takes gloo on CPUs."""

_ANSWERED = {None: "gloo", "nccl": "gloo", "cuda:nccl": "gloo"}
"""What a group answers for a name that it can't answer: scripts move tensors to a GPU where it is nccl."""

_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Group of another backend than its script named → the name that it answers."""


def is_replaced(torch: Any, backend: str | None) -> bool:
    """Whether the planned backend is taken where a script names this one."""
    named = _by_device(backend)
    return named in _OF_CPUS or (named in _OF_GPUS and not torch.cuda.is_available())


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
        _announce_group(_by_device(backend), settings)
        remember(of_all_ranks(), _answer(backend))
        return made

    @functools.wraps(new)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        usual = _name(of_all_ranks())
        name = usual if backend is None else _answer(backend)
        # What the group of all ranks answers stands for the backend that it has.
        planned = backend is None or name == usual or _by_device(backend) in _OF_GPUS
        planned = planned and is_replaced(torch, backend)
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


def _by_device(backend: str | None) -> str | None:
    """A backend's name in one of its spellings: ``cuda:nccl,cpu:gloo`` is ``cpu:gloo,cuda:nccl``."""
    return ",".join(sorted(backend.lower().split(","))) if isinstance(backend, str) else backend


def _answer(backend: str | None) -> str:
    named = _by_device(backend)
    return _ANSWERED.get(named) or str(backend).lower()


def _announce_group(named: str | None, settings: TrainingSettings) -> None:
    changes = list(pending_changes())
    if settings.backend not in (named, _GLOO.get(named)):
        changes.insert(0, f"backend {settings.backend}{f' (not {named})' if named else ''}")
    announce(*changes)
