"""Running jobs, and commands about them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

# Ranks print "ready", wait for each other in different ways, and end when a file "go" exists.
SLEEPS = """\
import os, pathlib, time
def load_batch():
    while not pathlib.Path("go").exists(): time.sleep(1)
def wait_for_all():
    while not pathlib.Path("go").exists(): time.sleep(1)
print("ready", flush=True)
load_batch() if os.environ["RANK"] == "1" else wait_for_all()
print("done", flush=True)
"""

Ask = Callable[..., "subprocess.CompletedProcess[str]"]
"""``cpulaunch ARGUMENTS``, beside a job."""


def directory_of(tmp_path: Path) -> Path:
    (found,) = tmp_path.glob("runs/*")
    return found
