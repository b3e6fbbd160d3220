"""The programs that most tests of a run start."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import programs


@pytest.fixture
def show(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text(programs.SHOW)
    return path


@pytest.fixture
def fail(tmp_path: Path) -> Path:
    path = tmp_path / "fail.py"
    path.write_text(programs.FAIL)
    return path
