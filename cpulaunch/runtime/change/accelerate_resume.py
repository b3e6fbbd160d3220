"""accelerate in restarted jobs: load the last state of ``save_state()``, and skip the batches before it.

This needs ``ProjectConfiguration(automatic_checkpoint_naming=True)``: only then is the states' directory
known.  When all ranks have saved a state, it gets a file ``cpulaunch.json`` with the job that saved it, and
with the completed passes and the position of each prepared loader.  Before the first batch, the job's newest
state is loaded.  A loader whose batches were trained on (``accelerator.backward``) then yields no batches
in completed passes, and in the interrupted pass only those that are left.
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
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.reports import resumed_from, saved
from cpulaunch.runtime.settings import TrainingSettings


@dataclass
class _Loader:
    """A prepared loader's position.  ``skip``: the whole passes, and batches of the next, to leave out."""

    taken: int = 0
    trains: bool = False
    skip: tuple[int, int] = (0, 0)
    states: randomness.State | None = None


_accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
"""Accelerators that have not loaded a state yet."""
_loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
_steps = [0]
"""Steps of all optimizers, including those before the restart."""


def resume_own_states(module: Any, settings: TrainingSettings) -> None:
    """Patch ``accelerate.accelerator``."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    load_state = module.Accelerator.load_state
    loaders = import_module(f"{module.__package__}.data_loader")
    _leave_out_batches(loaders.DataLoaderShard, load_state, getattr(loaders, "synchronize_rng_states", None))
    _note_accelerators(module.Accelerator)
    _note_training(module.Accelerator)
    _note_states(module.Accelerator)
    register_optimizer_step_post_hook(_count_step)


def leave_to_script(accelerator: Any) -> None:
    """Stop handling this accelerator: something else loads its states."""
    _accelerators.discard(accelerator)


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    _steps[0] += 1


def _place(loader: Any) -> _Loader:
    return _loaders.setdefault(loader, _Loader())


def _note_accelerators(kind: Any) -> None:
    original, load = kind.__init__, kind.load_state

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _accelerators.add(self)

    @functools.wraps(load)
    def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        leave_to_script(self)  # the script then leaves batches out itself
        for place in _loaders.values():
            place.skip = (0, 0)
        return load(self, *args, **kwargs)

    kind.__init__, kind.load_state = __init__, load_state


def _note_training(kind: Any) -> None:
    original = kind.backward

    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        active = self.gradient_state.active_dataloader
        if active is not None:
            _place(active).trains = True
        return original(self, *args, **kwargs)

    kind.backward = backward


def _note_states(kind: Any) -> None:
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
    places = [(loader, _place(loader)) for loader in accelerator._dataloaders]
    loaders = [[loader.iteration, place.taken, place.trains] for loader, place in places]
    return {"optimizer_steps": _steps[0], "loaders": loaders}


def _root(accelerator: Any) -> Path:
    return Path(accelerator.project_dir, "checkpoints")


def _leave_out_batches(kind: Any, load_state: Any, synchronize: Any) -> None:
    original = kind.__iter__

    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[Any]:
        for accelerator in list(_accelerators):
            _accelerators.discard(accelerator)
            if resume.is_restarted():
                _go_on(accelerator, load_state)
        place = _place(self)
        passes, batches = place.skip
        if passes:
            place.skip = (passes - 1, batches)
            _pass_without_batches(self, synchronize)
            return
        place.skip, before = (0, 0), self.skip_batches
        place.taken, self.skip_batches = batches, before + batches
        try:
            for batch in original(self):
                if place.states is not None:
                    randomness.restore(place.states, None)
                    place.states = None
                place.taken += 1
                yield batch
        finally:
            self.skip_batches = before
        place.taken = 0

    kind.__iter__ = __iter__


def _pass_without_batches(loader: Any, synchronize: Any) -> None:
    """Run a loader's samplers without reading data, as the order of the next pass may depend on it."""
    if synchronize is not None and loader.rng_types is not None:
        synchronize(loader.rng_types, loader.synchronized_generator)
    loader.set_epoch(loader.iteration)
    for _ in loader.batch_sampler or ():
        pass
    loader.iteration += 1


def _go_on(accelerator: Any, load_state: Any) -> None:
    """Load the newest whole state, and have its batches skipped."""
    if not (accelerator.project_configuration.automatic_checkpoint_naming and accelerator.project_dir):
        log_once(
            "restarted: the script's states are not loaded, as only with a project_dir and "
            "automatic_checkpoint_naming is it known where accelerate saves them"
        )
        return
    found = resume.numbered(_root(accelerator), r"checkpoint_(\d+)")
    whole = [number for number, path in found.items() if resume.read_facts(path)]
    number = resume.agreed(whole[-1] if whole else None)
    # Names taken by an interrupted save can't be used again.
    accelerator.project_configuration.iteration = max(found, default=-1) + 1
    if number is None:
        log_once(
            "restarted: accelerate starts from the beginning, as this job has saved no state in "
            f"{_root(accelerator)} yet"
        )
        resumed_from(0)
        return
    facts = resume.read_facts(found[number])
    load_state(accelerator, str(found[number]))
    states = randomness.capture(None)
    for loader, (passes, batches, trains) in zip(accelerator._dataloaders, facts["loaders"], strict=False):
        if trains:
            keeps_place = getattr(loader, "use_stateful_dataloader", False)
            place = _place(loader)
            place.trains, place.skip, place.states = True, (passes, 0 if keeps_place else batches), states
    _steps[0] = facts["optimizer_steps"]
    log_once(f"restarted: accelerate resumes after step {_steps[0]} from {found[number]}")
    resumed_from(_steps[0])
