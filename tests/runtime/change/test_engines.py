"""Engines of cpulaunch and of other packages are found by name, and used through one protocol."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from support.packages import install
from torch import nn

from cpulaunch import plugins
from cpulaunch.errors import UsageError
from cpulaunch.runtime.change import engines
from cpulaunch.runtime.change.engines.ipex import IpexEngine
from cpulaunch.runtime.prepare import own_optimizer
from runtime.conftest import Start

STAMPING_ENGINE = '''
"""Trains as torch does, and stamps each model with its first weight at the time of apply."""

from cpulaunch.runtime.change.engines.base import Engine


class Stamping(Engine):
    name = "stamping"
    needs_optimizer = True
    broadcast_first = True

    def version(self):
        return "7.1"

    def problem(self, model, optimizer):
        return "it doesn't stamp with RMSprop" if type(optimizer).__name__ == "RMSprop" else None

    def apply(self, model, optimizer):
        model.stamp = next(model.parameters()).flatten()[0].item()
        optimizer.stamped = True
        return model


ENGINE = Stamping()
NO_ENGINE = object()
'''


@pytest.fixture
def package(tmp_path: Path) -> dict[str, str]:
    """The environment in which the package of STAMPING_ENGINE is installed."""
    (tmp_path / "site").mkdir()
    points = "stamping = stamping_engine:ENGINE\nbroken = stamping_engine:NO_ENGINE"
    return install(tmp_path / "site", "stamping_engine", STAMPING_ENGINE, {plugins.ENGINES: points})


@pytest.mark.slow
def test_an_engine_of_another_package_trains_a_job(job: Start, package: dict[str, str]) -> None:
    options = ("--engine", "stamping", "--precision", "bf16")
    done = job(2, "stamped", "AdamW", options=options, **package)
    first, second = done.results
    assert first == second  # ranks began with different weights
    assert first["stamp"] is not None
    assert (first["stamped"], first["falls"]) == (True, True)
    assert [line for line in done.ours() if line == "bf16, engine stamping: as requested, version 7.1"]


@pytest.mark.slow
def test_an_engine_may_leave_a_model_to_the_engine_native(job: Start, package: dict[str, str]) -> None:
    done = job(1, "stamped", "RMSprop", options=("--engine", "stamping", "--precision", "bf16"), **package)
    assert [(result["stamp"], result["falls"]) for result in done.results] == [(None, True)]
    assert [
        line
        for line in done.ours()
        if line == "Sequential gets the engine native: it doesn't stamp with RMSprop"
    ]


def test_an_engine_of_another_package_is_loaded_by_its_name(
    package: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(package["PYTHONPATH"].split(os.pathsep)[0])
    assert engines.load("stamping").version() == "7.1"
    with pytest.raises(
        UsageError, match=r"'broken' of cpulaunch.engines is not an engine: it lacks apply, .*name"
    ):
        engines.load("broken")


def test_an_unknown_name_is_an_error_with_the_valid_names() -> None:
    with pytest.raises(UsageError, match="'natve'.*did you mean 'native'"):
        engines.load("natve")


@pytest.mark.parametrize(
    ("version", "torch_version", "flags", "expected"),
    [
        ("2.8.0", "2.8.0+cpu", ("amx_bf16", "avx512_bf16"), None),
        ("2.8.0", "2.8.1", ("avx512_bf16",), None),
        ("2.8.0", "2.13.0", ("avx512_bf16",), "IPEX 2.8.0 is for torch 2.8.*, and this is torch 2.13.0"),
        ("2.8.0", "2.8.0", (), "IPEX does bf16 only on CPUs with instructions for it"),
        ("2.8.0", "2.8.0", ("bf16",), "IPEX does bf16 only on CPUs with instructions for it"),
        ("2.8.0", "2.8.0", None, None),
    ],
)
@pytest.mark.usefixtures("fitting_transformers")
def test_conditions_for_ipex(version, torch_version, flags, expected) -> None:
    problem = IpexEngine(version).unavailable(torch_version, flags)
    assert (problem or "").startswith(expected or "")
    assert (problem is None) == (expected is None)


@pytest.mark.parametrize("fits", [True, False])
def test_ipex_is_not_imported_beside_an_incompatible_transformers(
    tmp_path: Path, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    for name in ("__init__.py", *(["modeling_attn_mask_utils.py"] if fits else [])):
        (package / name).touch()
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    expected = (
        f"IPEX 2.8.0 can't be imported with transformers {metadata.version('transformers')} "
        "(pip install 'transformers<5.24')"
    )
    assert IpexEngine("2.8.0").unavailable("2.8.0", None) == (None if fits else expected)


def test_ipex_does_not_support_every_setup() -> None:
    model = nn.Linear(2, 2)
    adamw = torch.optim.AdamW(model.parameters())
    assert IpexEngine().problem(model, adamw) is None
    rmsprop = torch.optim.RMSprop(model.parameters())
    assert "no fused step for RMSprop; it has for Adam, AdamW" in (IpexEngine().problem(model, rmsprop) or "")
    model(torch.zeros(1, 2)).sum().backward()
    adamw.step()
    assert "its AdamW has a state already" in (IpexEngine().problem(model, adamw) or "")


def test_the_optimizer_of_a_model() -> None:
    """Engines that need a model's optimizer get it if it is the only one and trains no other model;
    otherwise, they get a reason."""
    first, second, third, fourth = (nn.Linear(2, 2) for _ in range(4))
    own, shared = (
        torch.optim.SGD(first.parameters()),
        torch.optim.AdamW([*second.parameters(), *third.parameters()]),
    )
    again = torch.optim.SGD(third.parameters())

    def optimizer_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple:
        return own_optimizer(model, [first, second, third, fourth], list(optimizers))

    assert optimizer_of(first, own, shared) == (own, "")
    assert optimizer_of(second, own, shared) == (None, "its AdamW trains another model, too")
    assert optimizer_of(third, shared, again) == (None, "it has several optimizers")
    assert optimizer_of(fourth, own, shared) == (
        None,
        "its optimizer was not passed to the same call of prepare",
    )
