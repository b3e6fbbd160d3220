"""Write and read batch scripts for Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from cpulaunch.queues.slurm.options import requests_share

_REQUEUING = """\
{command} &
trap 'kill -TERM $!' TERM USR1 USR2
while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done  # the signal interrupts wait
job=$(scontrol show job "$SLURM_JOB_ID")  # after scancel, it is COMPLETING
if [[ $job = *JobState=RUNNING* && ( $code -eq 75 || $code -ne 0 && $job = *PreemptTime=[0-9]* ) ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def batch_script(options: Sequence[tuple[str, str]], command: Sequence[str]) -> str:
    """Write the script that runs ``command`` with ``options`` of sbatch, such as ``("--time", "2:00:00")``.

    Without an option of SHARES, the job gets whole nodes.  With --requeue, the script requeues the job if
    ``command`` exits with 75 or was preempted.
    """
    named = dict(options)
    lines = ["#!/bin/bash"]
    lines += [
        f"#SBATCH {name}={shlex.quote(value)}" if value else f"#SBATCH {name}" for name, value in options
    ]
    if not requests_share(named):
        lines.append("#SBATCH --exclusive")
    if "--requeue" not in named:
        return "\n".join([*lines, f"exec {shlex.join(command)}"]) + "\n"
    if "--open-mode" not in named:
        lines.append("#SBATCH --open-mode=append")
    return "\n".join([*lines, _REQUEUING.format(command=shlex.join(command))])


def options_of(script: str) -> dict[str, str]:
    """The options of sbatch in a script from `batch_script`, by name."""
    words = (shlex.split(line)[1] for line in script.splitlines() if line.startswith("#SBATCH "))
    return dict(word.partition("=")[::2] for word in words)


def appends(options: Mapping[str, str]) -> bool:
    """Whether the job appends to an existing log instead of truncating it."""
    return options.get("--open-mode", "append" if "--requeue" in options else "").startswith("a")
