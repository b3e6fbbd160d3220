"""``Checkpoint``: saves the state of a training, and resumes from it."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from cpulaunch import variables
from cpulaunch.config.kinds import Every
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import Table
from cpulaunch.config.values import Interval
from cpulaunch.errors import SAVED_EXIT_CODE, UsageError
from cpulaunch.runtime import distributed, reports
from cpulaunch.runtime.change.precision import current_precision, keep_precision
from cpulaunch.runtime.checkpoint import buckets, directory, lock, position, randomness, state
from cpulaunch.runtime.checkpoint.directory import Facts, not_shared_error
from cpulaunch.runtime.checkpoint.due import Agreement
from cpulaunch.runtime.checkpoint.failures import Damaged, on_all_ranks
from cpulaunch.runtime.checkpoint.position import Position
from cpulaunch.runtime.checkpoint.saving import Saver
from cpulaunch.runtime.checkpoint.signals import Signals
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import training_settings
from cpulaunch.wording import counted

DEFAULT_EVERY = "10m"


class Checkpoint:
    """Checkpoints of a training, in a directory that all ranks' hosts share::

        checkpoint = cpulaunch.Checkpoint("ckpt", model=model, optimizer=optimizer, loader=loader)
        for epoch, step, (x, y) in checkpoint.steps(loader, epochs=3):
            ...  # one step of training
            checkpoint.save_if_due()

    ``model``, ``optimizer`` and ``scheduler`` may be lists.  Models may be plain, in DDP or in FSDP2.  A
    scheduler is any object with ``state_dict`` and ``load_state_dict``.  ``every``: a number of steps, or a
    time such as ``"10m"``, the default; the option ``--checkpoint-every`` overrides it.  ``keep``: the number
    of checkpoints to keep.

    Every rank must create a ``Checkpoint`` and call its methods at the same steps.  Raises UsageError if an
    argument is invalid, or if a rank doesn't see the directory.  In a trial of ``cpulaunch tune``, a
    ``Checkpoint`` neither reads nor writes.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer | Iterable[Optimizer] = (),
        scheduler: Any = (),
        loader: Any = None,
        every: int | str | None = None,
        keep: int = 2,
    ) -> None:
        self._models = _several(model, nn.Module, "model")
        self._optimizers = _several(optimizer, Optimizer, "optimizer")
        self._schedulers = list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]
        if any(not position.is_stateful(each) for each in self._schedulers):
            raise UsageError("Checkpoint: a scheduler has no state_dict and load_state_dict")
        if not isinstance(keep, int) or keep < 1:
            raise UsageError(f"Checkpoint: keep must be an integer of at least 1, got {keep!r}")
        if loader is not None and not hasattr(loader, "__iter__"):
            raise UsageError(f"Checkpoint: loader must be a data loader, got {type(loader).__name__}")
        if not os.fspath(directory):
            raise UsageError("Checkpoint: the directory has no name")
        interval = _interval(every)
        self._every_steps, self._every_seconds = interval.steps, interval.seconds
        distributed.init()
        self._rank, self._ranks = distributed.rank(), distributed.world_size()
        self._is_trial = variables.TUNING in os.environ
        self._root, self._loader = Path(directory).absolute(), loader
        self._group, agreement_group = _new_group(), _new_group()
        self._saver = Saver(self._root, self._group, self._rank, keep)
        self._agreement = Agreement(agreement_group if self._ranks > 1 else None, self._rank, self._ranks)
        self._signals = Signals(self._log_late, self._seconds_to_save())
        self._position = Position()
        self._bucket_orders: list[list[str] | None] | None = None
        self._step = self._saved_step = 0
        self._saved_at = time.monotonic()
        self._resumed = self._iterates = self._counts = self._checked = False
        self._optimizer_steps = self._uncounted_from = 0
        for each in self._optimizers:
            each.register_step_post_hook(self._count_step)
        if not self._is_trial:
            self._make_root()

    def resume(self) -> int:
        """Load the newest readable checkpoint; return the number of its completed steps, or 0 without one.

        ``steps`` calls this.  A loop without ``steps`` must call it once, before its first step; it counts a
        step at each call of ``save_if_due``.
        """
        if self._is_trial:
            return self._step
        self._signals.watch()
        if self._resumed:
            return self._step
        self._resumed = True
        if owner := self._broadcast(self._rank == 0 and lock.claim(self._root)):
            raise UsageError(
                f"{self._root} is in use: {owner} writes its checkpoints there",
                hint="end it, or use another directory for this job",
            )
        self._load_newest()
        reports.resumed_from(self._optimizer_steps)
        self._saved_at = time.monotonic()
        return self._step

    def steps(self, loader: Any = None, epochs: int = 1) -> Iterator[tuple[int, int, Any]]:
        """Yield epoch, step and batch of each step after the last checkpoint.

        Epochs and steps count from 0, steps over all epochs.  ``loader`` defaults to the argument of the
        constructor.  Calls ``set_epoch`` of the loader and its samplers at the start of each epoch.
        """
        loader = self._loader if loader is None else loader
        if loader is None:
            raise UsageError("Checkpoint.steps: no data loader was passed: steps(loader, epochs=3)")
        if epochs < 0:
            raise UsageError(f"Checkpoint.steps: epochs must be at least 0, got {epochs}")
        self._loader, self._iterates, self._counts = loader, True, True
        self.resume()
        start, first = position.normalized(self._position, loader), self._step
        try:
            for epoch in range(start.epoch, epochs):
                here = start if epoch == start.epoch else Position(epoch)
                position.set_epoch(loader, epoch)
                if here.now and not here.batch:  # the epoch has not begun
                    randomness.restore(here.now, loader)
                    here = Position(epoch)
                at_start = here.at_start or randomness.capture(loader)
                batches = position.batches_from(loader, here)
                for number, batch in enumerate(batches, here.batch + 1):
                    self._position = Position(epoch, number, at_start)
                    self._step += 1
                    yield epoch, self._step - 1, batch
            self.wait()
            if self._step == first > 0:
                log_once(
                    f"{self._root} holds the finished run at step {first}: nothing is left to do; use "
                    "another directory or more epochs"
                )
        finally:
            self._signals.restore()

    def save_if_due(self) -> None:
        """Save in the background if a checkpoint is due.  Call this after each optimizer step.

        After SIGTERM, SIGUSR1 or SIGUSR2, saves at once and ends the program with exit code 75.
        """
        if self._is_trial:
            return
        self._signals.watch()
        self._check_resumed()
        if not self._iterates:
            self._step += 1
            self._counts = True
        self._saver.check()
        overdue = self._every_seconds is not None and time.monotonic() - self._saved_at >= self._every_seconds
        request = self._agreement.agree(self._signals.arrived, overdue and self._rank == 0)
        if request.stop:
            self._save_and_exit(request.stop, self._ranks - request.from_end)
        if request.save or (self._every_steps and self._step - self._saved_step >= self._every_steps):
            self.save()

    def save(self, step: int | None = None) -> None:
        """Save in the background, after waiting for an earlier save.

        ``step``: the number of completed steps, for a loop that uses neither ``steps`` nor ``save_if_due``.
        """
        if self._is_trial:
            return
        self._check_resumed()
        if step is not None:
            self._step = step
        elif self._optimizer_steps > self._uncounted_from and not self._counts:
            raise UsageError(
                "Checkpoint.save: the number of completed steps is unknown",
                hint="save(step=N), or call save_if_due() after each step, which counts them",
            )
        self._save()

    def _check_resumed(self) -> None:
        """Warn once if there are checkpoints, and the script has not called ``resume``."""
        if self._resumed or self._checked:
            return
        self._checked = True
        if self._rank == 0 and (last := directory.newest(self._root)):
            log_once(
                f"{last} exists, but was not loaded: to resume from it, call resume() before the first step"
            )

    def _save(self, *, urgent: bool = False) -> None:
        self._saver.wait()
        if self._bucket_orders is None and self._optimizer_steps and self._ranks > 2:
            self._bucket_orders = [buckets.order(model) for model in self._models]
        here = self._position._replace(now=randomness.capture(self._loader))
        if position.is_stateful(self._loader):
            here = here._replace(loader=self._loader.state_dict())
        precision = current_precision(training_settings())
        facts = Facts(self._step, self._optimizer_steps, here.epoch, here.batch, self._ranks, precision)
        shared = {"buckets": self._bucket_orders}
        own = self._rank, tuple(here)
        tensors = state.collect(self._models, self._optimizers, self._schedulers, own, shared)
        self._saver.start(tensors, facts, urgent=urgent)
        self._saved_step, self._saved_at = self._step, time.monotonic()

    def wait(self) -> None:
        """Wait until the last ``save`` has finished; if it failed, log why.

        Call this before ``torch.distributed.destroy_process_group()``.  ``steps`` calls ``wait`` at its end.
        """
        self._agreement.finish()
        self._saver.wait()

    def _load_newest(self) -> None:
        """Load the newest checkpoint that all ranks can read, if there is any."""
        existing = self._broadcast(list(directory.complete(self._root)) if self._rank == 0 else [])
        damaged: dict[int, str] = {}
        for step in reversed(existing):
            try:
                facts = self._load(self._root / f"step-{step}")
                break
            except Damaged as reason:
                damaged[step] = str(reason)
        else:
            if damaged:
                raise directory.all_damaged_error(self._root, damaged)
            if os.environ.get(variables.RESTART_COUNT, "0") != "0":
                log_once(f"{self._root} holds no checkpoint yet: this attempt starts from the beginning")
            return
        for step, why in damaged.items() if self._rank == 0 else ():
            aside = directory.rename_damaged(self._root / f"step-{step}")
            log_once(
                f"{self._root}/step-{step} is damaged: {why}; it is now {aside.name}, and the run resumes "
                f"after step {self._step}"
            )
        log_once(f"resuming after step {self._step} from {self._root}/step-{self._step}")
        if facts.world_size != self._ranks:
            log_once(
                f"the checkpoint was saved by {counted(facts.world_size, 'rank')}, and this job has "
                f"{self._ranks}: the order of the data and the random numbers will differ"
            )

    def _load(self, path: Path) -> Facts:
        saved = state.Saved(path, self._group)
        facts = on_all_ranks(lambda: directory.read_facts(path), self._group)
        same = facts.world_size == self._ranks
        shared, own = saved.objects(self._rank if same else None)
        if same:
            for model, names in zip(self._models, shared["buckets"] or (), strict=False):
                if names:
                    buckets.rebuild(model, names)
        saved.load(self._models, self._optimizers, self._schedulers, shared)
        self._step = self._saved_step = facts.step
        self._optimizer_steps = self._uncounted_from = facts.optimizer_steps
        if facts.precision:
            keep_precision(facts.precision, training_settings())
        here = Position(facts.epoch, facts.batch)
        self._position = Position(*own) if same else position.for_ranks(here, facts.world_size, self._ranks)
        if same and self._position.now and not self._iterates:
            randomness.restore(self._position.now, self._loader)
        return facts

    def _save_and_exit(self, number: int, rank: int) -> None:
        name = signal.Signals(number).name
        log_once(f"{name} on rank {rank}: saving step {self._step}, then ending")
        self._agreement.finish()
        if not self._saver.wait() or self._step != self._saved_step:
            self._save(urgent=True)
        saved = self._saver.wait()
        self._signals.mark_handled()
        if saved:
            log_once(f"{name}: saved step {self._step}, ending with exit code {SAVED_EXIT_CODE}")
            reports.saved(self._optimizer_steps, leaving=True)
            sys.exit(SAVED_EXIT_CODE)
        sys.exit(128 + number)

    def _seconds_to_save(self) -> float | None:
        """Return the seconds after a signal at which rank 0 logs that saving is late; None for never."""
        if self._rank != 0 or variables.JOB_ID not in os.environ:  # the grace period is unknown
            return None
        grace = rank_setting(Table.watch.grace_period, os.environ)
        return grace - min(1.0, grace / 5)

    def _log_late(self, number: int, seconds: float) -> None:
        last = directory.newest(self._root)
        step = (
            f"the last checkpoint is that of {last.name.replace('-', ' ')}"
            if last
            else "there is no checkpoint"
        )
        log_once(f"{signal.Signals(number).name}: not saved within {seconds:g} s; {step}")

    def _count_step(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def _broadcast(self, value: Any) -> Any:
        return distributed.broadcast_object(value, self._group)

    def _make_root(self) -> None:
        """Create the directory, and check with a temporary file that all ranks see it."""
        probe = f".ranks-{secrets.token_hex(4)}"
        error = None
        if self._rank == 0:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                (self._root / probe).touch()
            except FileExistsError:
                error = f"{self._root} is a file, not a directory"
            except OSError as e:
                error = f"{self._root} can't be written: {e.strerror}"
        error, probe = self._broadcast((error, probe))
        visible: list[Any] = [True]
        if self._ranks > 1:
            visible = [None] * self._ranks
            dist.all_gather_object(visible, (self._root / probe).exists(), group=self._group)
        if self._rank == 0 and not error:
            (self._root / probe).unlink()
        if error:
            raise UsageError(error, hint="pass a directory that this user may write")
        if not all(visible):
            raise not_shared_error(self._root)


def _new_group() -> Any:
    restricted = rank_setting(Table.hosts.port_range, os.environ) != "auto"  # gloo can't restrict its ports
    return dist.new_group(backend="ccl" if restricted else "gloo", group_desc="cpulaunch.Checkpoint")


def _several(given: Any, kind: type, name: str) -> list[Any]:
    things = list(given) if isinstance(given, Iterable) and not isinstance(given, kind) else [given]
    for thing in things:
        if not isinstance(thing, kind):
            raise UsageError(
                f"Checkpoint: each {name} must be of type {kind.__name__}, got {type(thing).__name__}"
            )
    return things


def _interval(every: int | str | None) -> Interval:
    """Return the interval between checkpoints: the setting if there is one, else ``every``."""
    setting = rank_setting(Table.watch.checkpoint_every, os.environ)
    if setting != "auto":
        return setting
    kind: Every[NoReturn] = Every()
    try:
        return kind.from_text(str(DEFAULT_EVERY if every is None else every))
    except ValueError:
        raise UsageError(f"Checkpoint: every is {every!r}: expected {kind.describe}") from None
