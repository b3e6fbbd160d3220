"""Resumes scripts with accelerate in restarted jobs.

Before the first batch of a restarted job, the newest state that the job saved by ``save_state()`` is loaded.
The loaders used for training (``accelerator.backward``) then skip the batches that were used before the save.
The numbers of epochs and batches that the script has used of each loader are saved in ``cpulaunch.json`` in
the state's directory, after all ranks have saved.

This needs ``ProjectConfiguration(automatic_checkpoint_naming=True)``, without which the directory of the
states is unknown.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from cpulaunch.runtime.change import resume
from cpulaunch.runtime.checkpoint import randomness
from cpulaunch.runtime.distributed import broadcast_object
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.reports import resumed_from, saved
from cpulaunch.runtime.settings import TrainingSettings


@dataclass
class _Loader:
    """The position of a prepared loader.

    ``batches``: the number of batches of the current epoch that the script has used.  ``trains``: the loader
    is used for training.  ``skip``: the number of epochs to skip, and the number of batches to skip in the
    next epoch.  ``states``: the random states to restore at the first batch.
    """

    batches: int = 0
    trains: bool = False
    skip: tuple[int, int] = (0, 0)
    states: randomness.State | None = None


_accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
"""Accelerators that have not loaded a state."""
_loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
_steps = [0]
"""The number of steps of all optimizers, including the steps before the restart."""


def resume_own_states(module: Any, settings: TrainingSettings) -> None:
    """Patch ``accelerate.accelerator``."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    load_state = module.Accelerator.load_state
    loaders = import_module(f"{module.__package__}.data_loader")
    _skip_batches(loaders.DataLoaderShard, load_state, getattr(loaders, "synchronize_rng_states", None))
    _track_accelerators(module.Accelerator)
    _track_training(module.Accelerator)
    _track_states(module.Accelerator)
    register_optimizer_step_post_hook(_count_step)


def leave_to_script(accelerator: Any) -> None:
    """Don't load a state into this accelerator, because the script or its library loads one."""
    _accelerators.discard(accelerator)


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    _steps[0] += 1


def _position(loader: Any) -> _Loader:
    return _loaders.setdefault(loader, _Loader())


def _track_accelerators(kind: Any) -> None:
    original, load = kind.__init__, kind.load_state

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _accelerators.add(self)

    @functools.wraps(load)
    def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        leave_to_script(self)  # the script then skips batches itself
        for position in _loaders.values():
            position.skip = (0, 0)
        return load(self, *args, **kwargs)

    kind.__init__, kind.load_state = __init__, load_state


def _track_training(kind: Any) -> None:
    original = kind.backward

    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        active = self.gradient_state.active_dataloader
        if active is not None:
            _position(active).trains = True
        return original(self, *args, **kwargs)

    kind.backward = backward


def _track_states(kind: Any) -> None:
    original = kind.save_state

    @functools.wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = self.save_iteration
        result = original(self, *args, **kwargs)
        if self.project_configuration.automatic_checkpoint_naming:
            self.wait_for_everyone()
            if self.is_main_process:
                resume.write_facts(_root(self) / f"checkpoint_{number}", **_facts(self))
                saved(_steps[0])
        return result

    kind.save_state = save_state


def _facts(accelerator: Any) -> dict[str, Any]:
    positions = [(loader, _position(loader)) for loader in accelerator._dataloaders]
    loaders = [[loader.iteration, position.batches, position.trains] for loader, position in positions]
    return {"optimizer_steps": _steps[0], "loaders": loaders}


def _root(accelerator: Any) -> Path:
    return Path(accelerator.project_dir, "checkpoints")


def _skip_batches(kind: Any, load_state: Any, synchronize: Any) -> None:
    original = kind.__iter__

    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[Any]:
        for accelerator in list(_accelerators):
            _accelerators.discard(accelerator)
            if resume.is_restarted():
                _load_newest(accelerator, load_state)
        position = _position(self)
        epochs, batches = position.skip
        if epochs:
            position.skip = (epochs - 1, batches)
            _skip_epoch(self, synchronize)
            return
        position.skip, before = (0, 0), self.skip_batches
        position.batches, self.skip_batches = batches, before + batches
        try:
            for batch in original(self):
                if position.states is not None:
                    randomness.restore(position.states, None)
                    position.states = None
                position.batches += 1
                yield batch
        finally:
            self.skip_batches = before
        position.batches = 0

    kind.__iter__ = __iter__


def _skip_epoch(loader: Any, synchronize: Any) -> None:
    """Run a loader's samplers, on which the order of the next epoch may depend, without reading data."""
    if synchronize is not None and loader.rng_types is not None:
        synchronize(loader.rng_types, loader.synchronized_generator)
    loader.set_epoch(loader.iteration)
    for _ in loader.batch_sampler or ():
        pass
    loader.iteration += 1


def _load_newest(accelerator: Any, load_state: Any) -> None:
    """Load the newest complete state, and make the loaders skip the batches before it."""
    if not (accelerator.project_configuration.automatic_checkpoint_naming and accelerator.project_dir):
        log_once(
            "restarted: the script's states are not loaded: their directory is unknown without project_dir "
            "and automatic_checkpoint_naming"
        )
        return
    found = resume.numbered_directories(_root(accelerator), r"checkpoint_(\d+)")
    complete = [number for number, path in found.items() if resume.read_facts(path)]
    number = broadcast_object(complete[-1] if complete else None)
    # accelerate refuses to save to a directory that an interrupted save has left.
    accelerator.project_configuration.iteration = max(found, default=-1) + 1
    if number is None:
        log_once(
            "restarted: accelerate starts from the beginning, because this job has saved no state in "
            f"{_root(accelerator)} yet"
        )
        resumed_from(0)
        return
    facts = resume.read_facts(found[number])
    load_state(accelerator, str(found[number]))
    states = randomness.capture(None)
    for loader, (epochs, batches, trains) in zip(accelerator._dataloaders, facts["loaders"], strict=False):
        if trains:
            position = _position(loader)
            position.trains, position.states = True, states
            stateful = getattr(loader, "use_stateful_dataloader", False)  # it resumes within the epoch itself
            position.skip = (epochs, 0 if stateful else batches)
    _steps[0] = facts["optimizer_steps"]
    log_once(f"restarted: accelerate resumes after step {_steps[0]} from {found[number]}")
    resumed_from(_steps[0])
