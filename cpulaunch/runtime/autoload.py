"""The entry point that torch calls at the end of its own import (group ``torch.backends``).

In ranks of a cpulaunch job, it calls `runtime.install`.  Programs that don't import torch pay nothing for
this.
"""

from __future__ import annotations

import os
import sys

from cpulaunch import variables


def autoload() -> None:
    """Install changes and observers; no failure here breaks the import of torch, which calls this."""
    if variables.JOB_ID not in os.environ:
        return
    try:
        from cpulaunch.runtime.install import install

        install()
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
        print(
            f"cpulaunch: warning: torch is left unchanged, and steps are not counted: {error}",
            file=sys.stderr,
        )
