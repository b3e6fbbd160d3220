"""Packs built parts of the group in a wheel, for nodes that have no compiler or no network."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from cpulaunch import __version__
from cpulaunch.ccl.installed import PACKAGES, Part
from cpulaunch.errors import UsageError

_INIT = '"""The compiled process group of cpulaunch, which loads it when a ccl group is made."""\n'


def write_wheel(
    parts: Sequence[Part], directory: Path, *, package: str = PACKAGES[0], platform: str = ""
) -> Path:
    """Write a wheel with ``parts`` into ``directory`` and return its path.

    A wheel with a layer is for one series of torch and one version of Python; the core alone is for all.
    ``platform`` is the wheel's platform tag, by default this system's.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", hint="Create it first.")
    layers = [part for part in parts if part.kind == "layer"]
    platform = platform or f"linux_{parts[0].machine}"
    tag, version, requires = f"py3-none-{platform}", __version__, ""
    for layer in layers:
        tag = f"{layer.python}-{layer.python}-{platform}"
        version += f"+torch{re.sub('[^a-z0-9]+', '.', layer.torch.lower())}"
        is_series = re.fullmatch(r"\d+\.\d+", layer.torch)
        requires += f"Requires-Dist: torch=={layer.torch.partition('+')[0]}{'.*' if is_series else ''}\n"
    if layers and not any(part.kind == "core" for part in parts):
        requires += f"Requires-Dist: {PACKAGES[1].replace('_', '-')}=={__version__}\n"
    info = f"{package}-{version}.dist-info"
    files = {f"{package}/__init__.py": _INIT.encode()}
    for part in parts:
        for path in sorted(part.directory.iterdir()):
            is_licence = path.name.startswith("LICENSE")
            place = f"{info}/licenses" if is_licence else f"{package}/{part.kind}"
            files[f"{place}/{path.name}"] = path.read_bytes()
    files[f"{info}/METADATA"] = (
        "Metadata-Version: 2.1\n"
        f"Name: {package.replace('_', '-')}\n"
        f"Version: {version}\n"
        f"Summary: cpulaunch's process group ccl, compiled: {', '.join(part.kind for part in parts)}\n"
        f"{requires}"
    ).encode()
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: cpulaunch\nRoot-Is-Purelib: false\nTag: {tag}\n"
    ).encode()
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode() + b"\n"
    path = directory / f"{package}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
