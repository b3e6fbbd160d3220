"""Ordinary scripts with Lightning, pytorch-ignite, accelerate, transformers and DeepSpeed.

Each function is a rank's program, started as ``programs_libraries.py NAME ARGS``.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any

import torch
import torch.distributed as dist
from programs_torch import batch, model, weights
from report import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(24, 8, generator=generator), torch.randint(4, (24,), generator=generator)
    )


def loss_of(result: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(result.float(), labels)


def lightning() -> dict:
    """Run several Trainers: the default one, one with too many devices, and DDP in each precision."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()
            self.kind = ""

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            result = self.net(batch[0])
            self.kind = str(result.dtype)
            return loss_of(result, batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", loss_of(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def fit(**options: Any) -> tuple[Module, Any]:
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        module = Module()
        loader = DataLoader(data(), 4)
        trainer.fit(module, loader, loader)
        return module, trainer

    module, trainer = fit()
    result: dict[str, Any] = {"auto": [trainer.world_size, type(trainer.strategy).__name__, module.kind]}
    for devices in ("auto", 4):
        try:
            fit(strategy="ddp", devices=devices)
        except ValueError as error:
            result[f"{devices} devices"] = str(error)
    for precision in ("32-true", "bf16-mixed", None):
        module, trainer = fit(strategy="ddp", devices=2, precision=precision)
        result[str(precision)] = [trainer.world_size, module.kind, weights(module.parameters())]
        result[f"loss {precision}"] = round(trainer.callback_metrics["loss"].item(), 3)
    result["environment"] = type(trainer.strategy.cluster_environment).__name__
    try:
        fit(strategy="fsdp", devices=2)
    except ValueError as error:
        result["fsdp"] = str(error)
    return result


def fabric() -> dict:
    from lightning.fabric import Fabric

    result = {}
    for precision in ("32-true", None):
        fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2, precision=precision)
        fabric.launch()
        net = model()
        kinds: set[str] = set()
        net[0].register_forward_hook(lambda module, inputs, out, kinds=kinds: kinds.add(str(out.dtype)))
        ready, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        for inputs, labels in fabric.setup_dataloaders(DataLoader(data(), 4)):
            fabric.backward(loss_of(ready(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        gathered = fabric.all_gather(torch.tensor(float(fabric.global_rank)))
        result[str(precision)] = [
            fabric.world_size,
            sorted(kinds),
            weights(net.parameters()),
            gathered.tolist(),
        ]
    return result


def ignite() -> dict:
    import ignite.distributed as idist
    from ignite.engine import Engine

    idist.initialize("gloo")
    atexit.register(idist.finalize)
    torch.manual_seed(idist.get_rank())  # different weights, which DDP makes equal
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    ready = idist.auto_model(net)
    optimizer = idist.auto_optim(torch.optim.SGD(ready.parameters(), lr=0.1))

    def step(engine: Engine, batch: Any) -> float:
        optimizer.zero_grad()
        loss = loss_of(ready(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    trainer.run(idist.auto_dataloader(data(), batch_size=8), max_epochs=2)
    total = idist.all_reduce(float(idist.get_rank() + 1))
    idist.barrier()
    return {
        "backend": idist.backend(), "wrapped": type(ready).__name__, "total": total,
        "steps": trainer.state.iteration, "weights": weights(net.parameters()),
    }  # fmt: skip


def accelerate(kind: str) -> dict:
    """An Accelerator with FSDP, or with DeepSpeed."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    if kind == "deepspeed":
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    else:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(kind), auto_wrap_policy="no_wrap")
        accelerator = Accelerator(fsdp_plugin=plugin)
    net, loader = model(), DataLoader(data(), 4)
    if kind == "1":  # it takes the optimizer after the model
        ready = accelerator.prepare(net)
        optimizer, loader = accelerator.prepare(torch.optim.AdamW(ready.parameters(), lr=0.01), loader)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        ready, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    losses = []
    for _ in range(2):
        for inputs, labels in loader:
            loss = loss_of(ready(inputs.to(next(ready.parameters()).dtype)), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {
        "kind": str(accelerator.distributed_type), "class": type(ready).__name__, "falls": losses[-1] < losses[0],
        "size": accelerator.num_processes, "precision": str(next(ready.parameters()).dtype),
        "losses": [round(loss, 3) for loss in losses],
    }  # fmt: skip


def trainer(sharded_by: str = "") -> dict:
    """Train, evaluate and save with transformers' Trainer, and resume with a second one."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=5, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    rows = [{"input_ids": torch.randint(50, (12,)), "labels": label % 5} for label in range(32)]
    further: dict[str, Any] = {}
    if sharded_by == "deepspeed":
        further["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"},
        }  # fmt: skip

    def run(steps: int, resume: bool) -> Any:
        arguments = TrainingArguments(
            output_dir="checkpoints", max_steps=steps, report_to=[], per_device_train_batch_size=4,
            disable_tqdm=True, save_steps=2, eval_strategy="steps", eval_steps=2, use_cpu=True, **further,
        )  # fmt: skip
        torch.manual_seed(0)
        it = Trainer(
            model=BertForSequenceClassification(config), args=arguments, train_dataset=rows, eval_dataset=rows
        )
        it.train(resume_from_checkpoint=resume)
        return it

    first = run(2, resume=False)
    second = run(4, resume=True)
    return {
        "steps": [first.state.global_step, second.state.global_step],
        "loss": round(second.evaluate()["eval_loss"], 3),
        "engine": type(second.model_wrapped).__name__,
        "logged": [sorted(entry) for entry in second.state.log_history][-1:],
    }


def deepspeed() -> dict:
    """DeepSpeed's own engine, ZeRO stage 2."""
    import deepspeed

    net = model()
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }  # fmt: skip
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    losses = []
    for _ in range(6):
        loss = engine(batch(0, dist.get_rank()).bfloat16()).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {
        "class": type(engine).__name__,
        "falls": losses[-1] < losses[0],
        "losses": [round(x, 2) for x in losses],
    }


if __name__ == "__main__":
    report(globals()[sys.argv[1]](*sys.argv[2:]))
