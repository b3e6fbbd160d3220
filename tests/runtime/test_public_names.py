"""The public names of ``import cpulaunch``, and its cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cpulaunch


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, cpulaunch; assert 'torch' not in sys.modules and len(sys.modules) < 60, len(sys.modules);"
        "assert set(cpulaunch.__all__) <= set(dir(cpulaunch)); import cpulaunch.agent.launch.environment;"
        "assert cpulaunch.rank() == 3 and 'torch' in sys.modules and cpulaunch.agent.launch.environment;"
        "import inspect; assert all(inspect.getdoc(getattr(cpulaunch, n)) for n in cpulaunch.__all__)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": ":".join(sys.path), "RANK": "3"},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_no_other_name_is_public() -> None:
    assert cpulaunch.__all__ == [
        "Checkpoint",
        "accumulate",
        "autocast",
        "backend",
        "init",
        "is_main",
        "log",
        "metric",
        "prepare",
        "rank",
        "shard",
        "unwrap",
        "world_size",
    ]
    with pytest.raises(AttributeError, match="has no attribute 'prepaer'"):
        cpulaunch.prepaer  # noqa: B018
