"""Scripts with transformers' Trainer or accelerate that don't handle restarts, and are killed once.

``programs_resume.py NAME``: without RESTARTS in the environment, no rank is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

COUNT = int(os.environ.get("CPULAUNCH_RESTART_COUNT", "0"))
steps = 0


def die_at(step: int) -> None:
    """Make rank 1 die after ``step`` steps, but only if the job has not been restarted."""

    def stepped(*_: Any) -> None:
        global steps
        steps += 1
        if steps == step and COUNT == 0 and "STRUCK" in os.environ and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(stepped)


class Data(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.linspace(0, index / 32, 8), "labels": torch.tensor(index % 4)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def digest(model: nn.Module) -> str:
    weights = b"".join(each.detach().float().numpy().tobytes() for each in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()[:16]


def trainer() -> dict[str, Any]:
    """Eight steps an epoch, three epochs, a save at every 5th step; it dies in step 13.

    The directory also has an interrupted save and a checkpoint of another job.
    """
    from transformers import Trainer, TrainingArguments

    die_at(13)
    if COUNT:
        (Path("out") / "checkpoint-12").mkdir(exist_ok=True)
        (Path("out") / "checkpoint-12" / "trainer_state.json").write_text('{"global_step": 1')
        (Path("out") / "checkpoint-16").mkdir(exist_ok=True)
        (Path("out") / "checkpoint-16" / "cpulaunch.json").write_text('{"job": "another"}')
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, num_train_epochs=3, save_steps=5, save_total_limit=3,
        report_to="none", disable_tqdm=True, logging_strategy="no", learning_rate=0.01, seed=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Net()
    trained = Trainer(model=model, args=arguments, train_dataset=Data()).train()
    return {"step": trained.global_step, "steps here": steps, "weights": digest(model)}


def accelerate() -> dict[str, Any]:
    """Eight steps an epoch, three epochs, a save at every 5th step; it dies in step 13.

    The directory also has another job's state.
    """
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    die_at(13)
    set_seed(1)
    others = Path("project") / "checkpoints" / "checkpoint_7"
    others.mkdir(parents=True, exist_ok=True)
    (others / "cpulaunch.json").write_text('{"job": "another"}')
    project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    model, optimizer = Net(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader, held_out = DataLoader(Data(), 2, shuffle=True), DataLoader(Data(), 8)
    model, optimizer, scheduler, loader, held_out = accelerator.prepare(
        model, optimizer, scheduler, loader, held_out
    )
    done, evaluated = 0, 0
    for _ in range(3):
        model.train()
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done % 5 == 0:
                accelerator.save_state()
        model.eval()
        with torch.no_grad():
            evaluated += sum(1 for batch in held_out if model(**batch)["loss"] > 0)
    return {
        "steps here": done,
        "evaluated": evaluated,
        "rate": scheduler.get_last_lr()[0],
        "weights": digest(accelerator.unwrap_model(model)),
        "states": sorted(path.name for path in Path("project/checkpoints").iterdir()),
    }


if __name__ == "__main__":
    print("RESULT", json.dumps(globals()[sys.argv[1]]()), flush=True)
