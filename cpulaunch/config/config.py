"""The merged settings, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT = "default"
"""The origin of a value that is not set anywhere."""


@dataclass(frozen=True)
class Config:
    """Every setting's value and where it came from, and the environment it was read in."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    environ: Mapping[str, str]
    file: Path | None = None
    warnings: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def is_set(self, key: str) -> bool:
        """Whether this value is set anywhere, be it to the default."""
        return self.origins[key] != DEFAULT

    def where(self, key: str) -> str:
        """``"ccl.worker_count (cpulaunch.yaml:7)"``: how an error names a setting."""
        return f"{key} ({self.origins[key]})"
