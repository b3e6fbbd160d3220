"""How a rank's program tells the test what it found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def report(result: Any) -> None:
    """Hand ``result``, of plain values, to the test that has started this rank.

    Under torchrun the rank ends here: what gloo does at the end of a process, where it may abort or hang, is
    not what is compared.
    """
    path = Path(os.environ["TEST_RESULTS"], os.environ["RANK"])
    path.write_text(json.dumps(result))
    if "CPULAUNCH_JOB_ID" not in os.environ:
        os._exit(0)
