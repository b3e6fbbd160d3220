"""Callbacks for the import of a module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cpulaunch.runtime.change import import_hook
from cpulaunch.runtime.change.import_hook import after_import

# A module whose first line imports a module that calls after_import, just as libraries import torch.
MIDWAY = """
import hook_for_midway
class Thing:
    pass
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on sys.path.  Modules imported from it are removed at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    import_hook._finder.functions.clear()
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def mark(module: ModuleType) -> None:
    module.Thing.calls = getattr(module.Thing, "calls", 0) + 1


def test_the_callback_gets_an_imported_module_at_once(modules: Path) -> None:
    (modules / "there.py").write_text("class Thing: pass")
    module = importlib.import_module("there")
    after_import("there", mark)
    assert module.Thing.calls == 1


def test_the_callback_gets_a_module_when_it_is_imported(modules: Path) -> None:
    (modules / "later").mkdir()
    (modules / "later" / "__init__.py").write_text("from later.inner import Thing; seen = Thing.calls")
    (modules / "later" / "inner.py").write_text("class Thing: pass\n")
    after_import("later.inner", mark)
    assert importlib.util.find_spec("later") is not None  # finding it does not import it
    later = importlib.import_module("later")
    assert later.seen == later.Thing.calls == 1
    inner = sys.modules["later.inner"]
    assert type(inner.__loader__) is type(inner.__spec__.loader) is type(later.__loader__)
    assert inspect.getsource(inner) == "class Thing: pass\n"
    assert importlib.reload(inner).Thing.calls == 1  # a new class


def test_the_callback_gets_a_partially_imported_module_when_it_is_complete(modules: Path) -> None:
    (modules / "midway.py").write_text(MIDWAY)
    (modules / "hook_for_midway.py").write_text(
        "from cpulaunch.runtime.change.import_hook import after_import\n"
        "from runtime.change.test_import_hook import mark\n"
        "after_import('midway', mark)"
    )
    midway = importlib.import_module("midway")
    assert midway.Thing.calls == 1  # no other module was imported since
    assert type(midway.__spec__) is importlib.machinery.ModuleSpec
    assert midway.__spec__._initializing is False


def test_a_failed_import_calls_nothing(modules: Path) -> None:
    (modules / "failing.py").write_text("import hook_for_failing\nraise ValueError('no')")
    (modules / "hook_for_failing.py").write_text(
        "from cpulaunch.runtime.change.import_hook import after_import\n"
        "from runtime.change.test_import_hook import mark\n"
        "after_import('failing', mark)\nafter_import('failing_later', mark)"
    )
    (modules / "failing_later.py").write_text("1 / 0")
    with pytest.raises(ValueError, match="no"):
        importlib.import_module("failing")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("failing_later")
    assert not {"failing", "failing_later"} & set(sys.modules)


def test_a_missing_module_stays_missing(modules: Path) -> None:
    after_import("there_is_no_such_module", mark)
    with pytest.raises(ModuleNotFoundError, match="No module named 'there_is_no_such_module'"):
        importlib.import_module("there_is_no_such_module")


@pytest.mark.slow
def test_libraries_that_import_torch_are_changed_before_scripts_use_them(tmp_path: Path) -> None:
    """transformers.training_args is still being imported when torch calls us."""
    code = (
        "from transformers.training_args import TrainingArguments as T\n"
        "assert T.__post_init__.__module__ == 'transformers.training_args', T.__post_init__.__module__\n"
        "assert hasattr(T.__post_init__, '__wrapped__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env={"PATH": "", "HOME": str(tmp_path), "CPULAUNCH_JOB_ID": "j", "CPULAUNCH_BACKEND": "gloo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
