"""transformers: the Trainer trains on CPUs and resumes; gelu and losses use the kernels."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from cpulaunch.runtime.change import accelerate_resume, kernels, resume
from cpulaunch.runtime.distributed import broadcast_object
from cpulaunch.runtime.hooks import Change
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.reports import resumed_from, saved
from cpulaunch.runtime.settings import TrainingSettings

TRIED = ("5.23.0", "5.24.0")


def _use_cpu(training_args: Any, settings: TrainingSettings) -> None:
    """Set ``use_cpu``, without which ``TrainingArguments`` refuses bf16 on CPUs."""
    original = training_args.TrainingArguments.__post_init__

    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.use_cpu = True
        original(self, *args, **kwargs)

    training_args.TrainingArguments.__post_init__ = __post_init__


def _resume(trainer: Any, settings: TrainingSettings) -> None:
    """Make a restarted job's Trainer resume from its last complete checkpoint if the script names none."""
    if not resume.may_restart():
        return
    original = trainer.Trainer.train

    class SaveCallback(trainer.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if state.is_world_process_zero and path.is_dir():  # not in trials of hyperparameter_search
                resume.write_facts(path)
                saved(state.global_step)

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.add_callback(SaveCallback())
        accelerate_resume.leave_to_script(self.accelerator)
        if resume_from_checkpoint is None and resume.is_restarted():
            step, path = broadcast_object(_last_complete(self.args))
            if path is not None:
                resume_from_checkpoint = path
                log_once(f"restarted: the Trainer resumes after step {step} from {path}")
            else:
                log_once(
                    "restarted: the Trainer starts from the beginning, because this job has saved no "
                    f"checkpoint in {self.args.output_dir} yet"
                )
            resumed_from(step)
        return original(self, resume_from_checkpoint, *args, **kwargs)

    trainer.Trainer.train = train


def _last_complete(arguments: Any) -> tuple[int, str | None]:
    """Return step and directory of this job's last complete checkpoint; 0 and None if there is none."""
    found = resume.numbered_directories(Path(arguments.output_dir), r"checkpoint-(\d+)")
    for step, path in reversed(found.items()):
        if resume.read_facts(path) and resume.is_complete(path):
            return step, str(path)
    return 0, None


def _fuse_gelu(activations: Any, settings: TrainingSettings) -> None:
    """Compute GPT-2's ``gelu_new`` as one operation instead of eight, if the kernels are enabled."""
    original = activations.NewGELUActivation.forward

    @functools.wraps(original)
    def forward(self: Any, input: torch.Tensor) -> Any:
        if not kernels.are_enabled:
            return original(self, input)
        return torch.nn.functional.gelu(input, approximate="tanh")

    activations.NewGELUActivation.forward = forward


def _keep_logits_in_bf16(losses: Any, settings: TrainingSettings) -> None:
    """Do not copy a causal model's logits to fp32 within autocast, where cross entropy computes in fp32."""
    original = losses.ForCausalLMLoss

    @functools.wraps(original)
    def loss(
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        in_bf16 = logits.dtype == torch.bfloat16 and torch.is_autocast_enabled("cpu")
        if not (in_bf16 and kernels.are_enabled):
            return original(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        if shift_labels is None:
            assert labels is not None
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        targets = shift_labels.view(-1).to(logits.device)
        rows = logits.view(-1, vocab_size)
        return losses.fixed_cross_entropy(rows, targets, num_items_in_batch, ignore_index, **kwargs)

    losses.ForCausalLMLoss = loss
    for name, chosen in losses.LOSS_MAPPING.items():
        if chosen is original:
            losses.LOSS_MAPPING[name] = loss


CHANGES = (
    Change(
        ("TrainingArguments.__post_init__",),
        ("TrainingArguments.use_cpu",),
        "trains on the CPU (`use_cpu`); otherwise bf16 is refused",
        "scripts must select the CPU themselves, for example with TrainingArguments(use_cpu=True)",
        _use_cpu,
    ),
)

OF_TRAINER = (
    Change(
        ("Trainer.train",),
        ("TrainerCallback.on_save",),
        "resumes from the last checkpoint in a restarted job",
        "a restarted job trains from the start unless the script itself resumes",
        _resume,
    ),
)

OF_ACTIVATIONS = (
    Change(
        ("NewGELUActivation.forward",),
        (),
        "computes `gelu_new` as one operation (`--engine native`)",
        "`gelu_new` is computed as eight operations",
        _fuse_gelu,
    ),
)

OF_LOSSES = (
    Change(
        ("ForCausalLMLoss", "LOSS_MAPPING"),
        ("fixed_cross_entropy",),
        "leaves a causal model's logits in bf16 within autocast (`--engine native`)",
        "logits are copied to fp32 for the loss",
        _keep_logits_in_bf16,
    ),
)
