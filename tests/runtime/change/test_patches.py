"""Patches of libraries: they apply if the needed names exist; if not, one line reports it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cpulaunch.runtime import hooks, install
from cpulaunch.runtime.change import base, groups
from cpulaunch.runtime.install import MODULES, OF_TORCH, Patched
from cpulaunch.runtime.settings import TrainingSettings

PATCHED = (OF_TORCH, *MODULES)
LIBRARIES = sorted({patched.library for patched in PATCHED})
SETTINGS = TrainingSettings(in_job=True, backend="ccl", precision="bf16")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of rank 0 in which nothing was logged or registered."""
    owners = base.precision_owners[:]
    base.precision_owners.clear()
    monkeypatch.setattr("cpulaunch.runtime.log._logged", set())
    monkeypatch.setattr(base, "_announced", [])
    monkeypatch.delenv("RANK", raising=False)
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "")  # monkeypatch then restores it
        monkeypatch.delenv(name)
    yield
    base.precision_owners[:] = owners


@pytest.mark.parametrize("patched", PATCHED, ids=lambda patched: patched.module)
def test_each_missing_name_is_reported_in_one_line(
    patched: Patched, capsys: pytest.CaptureFixture[str]
) -> None:
    library = patched.library
    install.patch(patched, SETTINGS, ModuleType("another"))
    lines = capsys.readouterr().err.splitlines()
    expected: dict[str, list[str]] = {}
    for change in patched.changes:
        if change.needs:
            expected.setdefault(change.needs[0].partition(".")[0], []).append(change.without)
    title = f"cpulaunch: warning: {library} {metadata.version(library)}"
    assert expected
    assert lines == [f"{title} has no {name}, so {'; '.join(said)}" for name, said in expected.items()]


@pytest.mark.parametrize("patched", PATCHED, ids=lambda patched: patched.module)
def test_the_installed_version_has_all_names(patched: Patched, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(patched.module)
    without_effect = [(change._replace(apply=lambda *_: None), SETTINGS) for change in patched.changes]
    hooks.apply_changes(patched.library, without_effect, module)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_version_was_tried(library: str) -> None:
    tried = import_module(f"cpulaunch.runtime.change.{library}").TRIED
    version = metadata.version(library).partition("+")[0]
    assert version in tried, (
        f"run tests/scripts and test_scripts.py with {library} {version}; add it to TRIED if it passes"
    )


def test_one_missing_name_does_not_prevent_the_other_changes(capsys: pytest.CaptureFixture[str]) -> None:
    class PartialState:
        _shared_state: dict[str, object] = {}  # noqa: RUF012

        def __init__(self, cpu: bool = False, **options: object) -> None:
            self.cpu, self.options, self.device = cpu, options, torch.device("cpu", 0)

    state = SimpleNamespace(__name__="accelerate.state", PartialState=PartialState)
    install.patch(MODULES[0], SETTINGS, state)
    made = PartialState(False, backend="ccl", timeout=3)
    assert (made.cpu, made.options, made.device) == (True, {"timeout": 3}, torch.device("cpu"))
    (line,) = capsys.readouterr().err.splitlines()
    consequences = (
        "scripts that ask for DeepSpeed train with DDP",
        "scripts that ask for FSDP may train with DDP",
    )
    assert line.endswith(f"has no AcceleratorState, so {'; '.join(consequences)}")


@pytest.mark.parametrize("gpu", [False, True])
def test_groups_for_gpus_are_left_alone_if_a_gpu_exists(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for name in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"):
        assert groups.is_replaced(torch, name) is not gpu
    for name in (None, "undefined", "gloo", "mpi", "ccl", "cpu:gloo", "cpu:ccl", "CPU:mpi"):
        assert groups.is_replaced(torch, name)


@pytest.mark.parametrize(
    ("environment", "patched"),
    [
        ({}, False),
        ({"CPULAUNCH_BACKEND": "ccl", "CPULAUNCH_ENGINE": "none such"}, False),  # not read outside a job
        ({"CPULAUNCH_JOB_ID": "j", "CPULAUNCH_BACKEND": "ccl"}, True),
        ({"CPULAUNCH_JOB_ID": "j", "CPULAUNCH_BACKEND": "ccl", "CPULAUNCH_AS_WRITTEN": "1"}, False),
        ({"CPULAUNCH_JOB_ID": "j"}, False),
    ],
)
def test_ranks_of_a_job_are_patched(environment: dict[str, str], patched: bool) -> None:
    code = "import torch; print(torch.distributed.init_process_group.__code__.co_filename)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) == Path(base.__file__).with_name("groups.py")) == patched
