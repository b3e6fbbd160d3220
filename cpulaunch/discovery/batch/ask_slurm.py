"""What Slurm's own programs say: sinfo, scontrol, sbatch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence

from cpulaunch.errors import HostError
from cpulaunch.wording import cannot_run

TIMEOUT = 60.0
"""Seconds that Slurm's daemon may take for an answer."""


def ask_slurm(
    argv: Sequence[str],
    *,
    text: str = "",
    hint: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> str:
    """What the program prints that is given ``text`` to read.  ``tell`` gets the lines of its warnings.

    Raises HostError where it fails, and with ``hint`` where it isn't there.
    """
    program = argv[0]
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TIMEOUT)
    except OSError as e:
        raise HostError(cannot_run(program, e), hint=hint) from None
    except subprocess.TimeoutExpired:
        raise HostError(f"{program} has not answered within {TIMEOUT:.0f} s") from None
    if done.returncode:
        said = re.findall(rf"(?:{program}: )?(?:error|fatal): (.+)", done.stderr) or done.stderr.split("\n")
        raise HostError(f"{program}: {'; '.join(filter(None, said)) or f'exit code {done.returncode}'}")
    for line in done.stderr.splitlines():
        tell(line)
    return done.stdout
