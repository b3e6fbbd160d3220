"""Passes a rank's result to the test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def report(result: Any) -> None:
    """Pass ``result``, of plain values, to the test that has started this rank.

    Under torchrun the rank ends here, as gloo may abort or hang at the end of a process, which isn't
    compared.
    """
    path = Path(os.environ["TEST_RESULTS"], os.environ["RANK"])
    path.write_text(json.dumps(result))
    if "CPULAUNCH_JOB_ID" not in os.environ:
        os._exit(0)
