"""Prints the license of each package that an installation of cpulaunch brings, from their metadata.

    python scripts/licenses.py         with the Python of an environment in which cpulaunch is installed

The packages of torch's CUDA build are left out.  They are NVIDIA's, under NVIDIA's licenses.
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

CUDA = ("nvidia", "cuda", "triton")
VEGA = Path(__file__).parents[1] / "cpulaunch" / "report" / "vega" / "LICENSES.txt"


def name_of(requirement: str) -> str:
    """Return the normalized package name of a requirement such as ``Jinja2>=3; python_version > '3'``."""
    return re.sub(r"[-_.]+", "-", re.split(r"[ ;<>=!~\[(]", requirement, maxsplit=1)[0]).lower()


def closure(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Return package ``name`` and the installed packages that it needs, without those of its extras."""
    if name in found or name.startswith(CUDA):
        return found
    try:
        found[name] = distribution(name)
    except PackageNotFoundError:  # its marker excludes this environment
        return found
    for requirement in found[name].requires or ():
        if "extra ==" not in requirement:
            closure(name_of(requirement), found)
    return found


def license_of(package: Distribution) -> str:
    """Return the license from the metadata, from the newest field to the oldest."""
    about = package.metadata
    classifiers = [
        each.rpartition(" :: ")[2]
        for each in about.get_all("Classifier", ())
        if each.startswith("License ::")
    ]
    short = [text for text in (about.get("License") or "").splitlines()[:1] if text and len(text) < 60]
    return about.get("License-Expression") or ", ".join(short or classifiers) or "not stated"


def main() -> None:
    for name, package in sorted(closure("cpulaunch", {}).items()):
        print(f"{name:24} {package.version:16} {license_of(package)}")
    if VEGA.is_file():
        kinds = re.findall(r"^--- (\S+) (\S+): (.*)$", VEGA.read_text(), re.M)
        print(f"\nIn cpulaunch/report/vega, {len(kinds)} packages of npm:")
        for kind in sorted({kind for _, _, kind in kinds}):
            names = [name for name, _, each in kinds if each == kind]
            print(f"{kind:24} {', '.join(names)}")


if __name__ == "__main__":
    main()
