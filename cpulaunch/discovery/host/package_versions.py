"""Read the versions of installed packages from their files, as importing torch takes more than a second."""

from __future__ import annotations

import os
from collections.abc import Iterable

VERSION_FILES = {
    "torch": ("torch/version.py", "__version__"),
    "intel_extension_for_pytorch": ("intel_extension_for_pytorch/_version.py", "__version__"),
}
"""Package → the file in which it assigns its version, and the variable's name."""


def version_in(directories: Iterable[str], package: str) -> str | None:
    """The version of a package of VERSION_FILES in the first of ``directories`` that has it, or None."""
    file, name = VERSION_FILES[package]
    for directory in directories:
        try:
            with open(os.path.join(directory, file), encoding="utf-8") as f:
                for line in f:
                    left, equals, right = line.partition("=")
                    if equals and left.split(":")[0].strip() == name:
                        return right.strip().strip("'\"")
        except OSError:
            continue
    return None
