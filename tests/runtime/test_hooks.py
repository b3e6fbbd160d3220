"""The attributes that cpulaunch replaces in torch and elsewhere are all in the tables, and can't break a job."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import REPOSITORY, TIMEOUT, clean_environment

from cpulaunch.runtime.hooks import Change, _missing, apply_changes
from cpulaunch.runtime.install import OBSERVED, OF_INSTANCES, OF_TORCH
from cpulaunch.runtime.observe import abort, tracing

PROGRAM = Path(__file__).with_name("programs_hooks.py")
LIMIT = 280.0

SOME = (
    "",
    "optim.Optimizer.__init__",
    "_C._distributed_c10d.Work.wait",
    "autograd.profiler._enable_profiler",
)
"""Names of a class, of C++, and of an attribute that a trace replaces."""

NAMES = sorted({
    name
    for table in (*OBSERVED, OF_TORCH)
    if table.module == "torch"
    for change in table.changes
    for name in change.needs
})  # fmt: skip


def jobs(directory: Path, *names: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, PROGRAM, *names], cwd=directory, capture_output=True, text=True, timeout=LIMIT,
        env=clean_environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any]) -> None:
    """Assert that each job has succeeded, with one line about the missing name."""
    for name, job in found.items():
        assert job["codes"] == [0, 0], (name, job["lines"])
        warnings = [line for line in job["lines"] if line.startswith("cpulaunch: warning: torch ")]
        assert len(warnings) == bool(name), (name, job["lines"])
        if name:  # if the class would inherit the name, the line may name the class
            missing = warnings[0].partition(" has no ")[2].partition(", so ")[0]
            assert missing, (name, warnings)
            assert name.startswith(missing), (name, warnings)


def test_a_job_runs_although_torch_has_renamed_an_attribute(tmp_path: Path) -> None:
    check(jobs(tmp_path, *SOME))


@pytest.mark.repeats
@pytest.mark.parametrize("part", range(3))
def test_a_job_runs_whichever_attribute_torch_has_renamed(tmp_path: Path, part: int) -> None:
    check(jobs(tmp_path, *NAMES[part::3]))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"CPULAUNCH_JOB_ID": "j", "CPULAUNCH_ENGINE": "none such"}, 1),
        ({"CPULAUNCH_ENGINE": "none such"}, 0),  # not a rank of a job
    ],
)
def test_torch_can_be_imported_if_no_change_can_be_installed(environment: dict[str, str], said: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(1).item())"],
        env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
    assert done.stderr.count("cpulaunch: warning: torch is left unchanged") == said


def test_the_page_lists_the_changes() -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "hooks_page.py"))
    page = (REPOSITORY / "docs" / "scripts.md").read_text()
    assert script["page"]() == page, "run scripts/hooks_page.py"


# Prints every function of cpulaunch that is in a module or class of another package.
LIST = """
import os, sys, types, cpulaunch
PACKAGE = os.path.dirname(cpulaunch.__file__)
def ours(value):
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(PACKAGE)
def listed():
    found = set()
    for path, module in list(sys.modules.items()):
        if module is None or path.partition(".")[0] in ("cpulaunch", "__main__", "__mp_main__"):
            continue
        for name, value in list(vars(module).items()):
            if ours(value):
                found.add(f"{path}.{name}")
            elif issubclass(type(value), type) and not str(value.__module__).startswith("cpulaunch"):
                names = [each for each, inner in list(vars(value).items()) if ours(inner)]
                found.update(f"{value.__module__}.{value.__qualname__}.{each}" for each in names)
    hooks = sys.modules["torch.optim.optimizer"]
    for place in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        found.update(f"{place}: {hook.__qualname__}" for hook in getattr(hooks, place).values() if ours(hook))
    return sorted(found)
"""

JOB = (
    LIST
    + """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    print("\\n".join(listed()))
dist.destroy_process_group()
"""
)


def replaced(directory: Path, *options: str) -> list[str]:
    """The attributes that are replaced in a rank."""
    (directory / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--oversubscribe", "--tee", "all"]
    done = subprocess.run(
        [*command, "--backend", "gloo", "--precision", "bf16", *options, "job.py"], cwd=directory,
        env=clean_environment(), capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("[0] ") for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_as_written_nothing_is_replaced_and_one_hook_counts_steps(tmp_path: Path) -> None:
    hook = "_global_optimizer_post_hooks: _count_steps.<locals>.after_step"
    assert replaced(tmp_path, "--as-written") == [hook]


@pytest.mark.slow
def test_all_replaced_attributes_are_in_the_tables(tmp_path: Path) -> None:
    """A class or function may be in several modules; the table may use any of its names."""
    tables = [change for table in (*OBSERVED, OF_TORCH) for change in table.changes]
    declared = {name.rpartition(".")[2] for change in tables for name in change.replaces}
    lines = replaced(tmp_path, "--compress-gradients", "bf16")
    found = {line.rpartition(".")[2] for line in lines if ": " not in line}
    assert found - {"excepthook", "bind"} <= declared
    # This job has no launchers of processes, and no traces.
    assert declared - found <= {"launch_agent", *tracing.STARTS}, declared - found
    assert not {change.replaces for change in (*OF_INSTANCES.changes, *abort.CHANGES)} & {()}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("JSONEncoder.encode", ""),
        ("JSONEncoder.none", "JSONEncoder.none"),
        ("json.decoder.JSONDecoder.decode", ""),  # of another module of the library
        ("json.decoder.None.decode", "json.decoder.None"),
    ],
)
def test_a_missing_name_is_found_in_the_module_or_its_library(name: str, missing: str) -> None:
    import json.encoder

    assert _missing(json.encoder, name) == missing


def test_a_change_that_fails_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cpulaunch.runtime.log._logged", set())
    monkeypatch.delenv("RANK", raising=False)
    made: list[int] = []

    def fails(module: object, context: int) -> None:
        raise ValueError("no such thing")

    def works(module: object, context: int) -> None:
        made.append(context)

    apply_changes(
        "any", [(Change((), (), "", "it stays", fails), 1), (Change((), (), "", "", works), 2)], sys
    )
    assert made == [2]
    assert capsys.readouterr().err == "cpulaunch: warning: any: ValueError: no such thing, so it stays\n"
