"""A built group as a wheel, for nodes that have no compiler and no network."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from cpulaunch import __version__
from cpulaunch.ccl.installed import PACKAGE, Built
from cpulaunch.errors import UsageError

_INIT = '"""The compiled oneCCL process group of cpulaunch, which loads it when a ccl group is made."""\n'


def write_wheel(built: Built, directory: Path) -> Path:
    """Write ``built`` as a wheel into ``directory`` and return its path.

    The wheel fits one torch and one Python.  oneCCL, which it contains, is Intel's: its licence is inside.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", hint="Make it first.")
    public, _, _ = built.torch.partition("+")
    version = f"{__version__}+torch{re.sub('[^a-z0-9]+', '.', built.torch.lower())}"
    tag = f"{built.python}-{built.python}-linux_x86_64"
    info = f"{PACKAGE}-{version}.dist-info"
    files = {
        f"{PACKAGE}/__init__.py": _INIT.encode(),
        f"{PACKAGE}/_group.so": built.module.read_bytes(),
        f"{PACKAGE}/build.json": (built.directory / "build.json").read_bytes(),
        f"{info}/licenses/LICENSE-oneCCL.txt": (built.directory / "LICENSE-oneCCL.txt").read_bytes(),
        f"{info}/METADATA": (
            "Metadata-Version: 2.1\n"
            f"Name: {PACKAGE.replace('_', '-')}\n"
            f"Version: {version}\n"
            f"Summary: cpulaunch's oneCCL process group, compiled for torch {built.torch}\n"
            f"Requires-Dist: torch=={public}\n"
        ).encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: cpulaunch\nRoot-Is-Purelib: false\nTag: {tag}\n"
        ).encode(),
    }
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode() + b"\n"
    path = directory / f"{PACKAGE}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
