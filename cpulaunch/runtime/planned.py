"""What the launcher planned for this rank, read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from cpulaunch.errors import UsageError

_WORDS = {
    "CPULAUNCH_PRECISION": ("bf16", "fp32"),
    "CPULAUNCH_ENGINE": ("auto", "ipex", "native"),
    "CPULAUNCH_COMPRESS_GRADIENTS": ("none", "bf16"),
}


@dataclass(frozen=True)
class Planned:
    """The plan's values for a rank; the defaults hold outside of cpulaunch.

    ``backend`` and ``precision`` are None where nobody planned them; ``bucket_mb`` is in MB, None for
    torch's own size.  ``job``: whether this process is a rank of a cpulaunch job.
    """

    job: bool = False
    backend: str | None = None
    precision: str | None = None
    engine: str = "auto"
    compile: bool = False
    compress_gradients: str = "none"
    bucket_mb: int | None = None
    static_graph: bool = False
    as_written: bool = False


def planned(environ: Mapping[str, str] = os.environ) -> Planned:
    """What was planned.  UsageError where a variable holds a value that does not exist."""

    def word(name: str) -> str | None:
        value = environ.get(name) or None
        if value is not None and value not in _WORDS[name]:
            raise UsageError(f"{name} is {value!r}; valid: {', '.join(_WORDS[name])}")
        return value

    bucket = environ.get("CPULAUNCH_BUCKET_MB", "auto")
    if bucket != "auto" and not (bucket.isdecimal() and int(bucket) > 0):
        raise UsageError(f"CPULAUNCH_BUCKET_MB is {bucket!r}; valid: auto, or a whole number of at least 1")
    return Planned(
        job="CPULAUNCH_JOB_ID" in environ,
        backend=environ.get("CPULAUNCH_BACKEND") or None,
        precision=word("CPULAUNCH_PRECISION"),
        engine=word("CPULAUNCH_ENGINE") or "auto",
        compile=environ.get("CPULAUNCH_COMPILE") == "1",
        compress_gradients=word("CPULAUNCH_COMPRESS_GRADIENTS") or "none",
        bucket_mb=None if bucket == "auto" else int(bucket),
        static_graph=environ.get("CPULAUNCH_STATIC_GRAPH") == "1",
        as_written=environ.get("CPULAUNCH_AS_WRITTEN") == "1",
    )
