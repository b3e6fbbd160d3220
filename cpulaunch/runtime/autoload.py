"""The entry point (group ``torch.backends``) that torch calls at the end of its import."""

from __future__ import annotations

import os
import sys

from cpulaunch import variables


def autoload() -> None:
    """In a rank of a job, install changes and observers; a failure is only logged."""
    if variables.JOB_ID not in os.environ:
        return
    try:
        from cpulaunch.runtime.install import install

        install()
    except Exception as e:
        problem = f"torch is left unchanged, and steps are not counted: {type(e).__name__}: {e}"
        print(f"cpulaunch: warning: {problem}", file=sys.stderr)
