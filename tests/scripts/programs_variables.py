"""Passes torchrun's variables to the test.  Ranks may have more under cpulaunch.  torch isn't imported."""

from __future__ import annotations

import os

from report import report

PREFIXES = ("TORCH", "ROLE", "GROUP", "LOCAL", "MASTER", "CPULAUNCH_JOB")

report({n: v for n, v in os.environ.items() if n.startswith(PREFIXES) or n in ("RANK", "WORLD_SIZE")})
