"""Packages in a directory for PYTHONPATH, as if installed by pip."""

from __future__ import annotations

import os
from pathlib import Path

from cpulaunch.ccl.installed import BINDINGS


def install(directory: Path, name: str, module: str, entry_points: dict[str, str]) -> dict[str, str]:
    """Write a one-module package with entry points.  ``entry_points``: group → ``"name = module:attribute"``.

    Returns the environment in which Python finds it.
    """
    (directory / f"{name}.py").write_text(module)
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (f"[{group}]\n{line}\n" for group, line in entry_points.items())
    (info / "entry_points.txt").write_text("\n".join(groups))
    return _found_in(directory)


def stand_in(directory: Path, body: str, version: str) -> dict[str, str]:
    """Write a package with the names of Intel's bindings.

    Returns the environment in which Python finds it.
    """
    (package := directory / BINDINGS).mkdir()
    (package / "__init__.py").write_text(body)
    (info := directory / "oneccl_bind_pt-0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: oneccl_bind_pt\nVersion: {version}\n")
    return _found_in(directory)


def _found_in(directory: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])}
