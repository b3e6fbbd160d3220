"""The batch script of a job for Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from cpulaunch.manifests.sbatch_options import says_share

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


def batch_script(options: Sequence[str], command: Sequence[str]) -> str:
    """The script that runs ``command`` with ``options`` of sbatch, each a word such as ``--time=2:00:00``."""
    named = dict(option.partition("=")[::2] for option in options)
    lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in options)]
    if not says_share(named):
        lines.append("#SBATCH --exclusive")
    if "--requeue" not in named:
        return "\n".join([*lines, f"exec {shlex.join(command)}"]) + "\n"
    if "--open-mode" not in named:
        lines.append("#SBATCH --open-mode=append")
    return "\n".join([*lines, _REQUEUING.format(command=shlex.join(command))])


def appends(options: Mapping[str, str]) -> bool:
    """Whether what a job with sbatch's ``options`` prints comes after what is in its log already."""
    return options.get("--open-mode", "append" if "--requeue" in options else "").startswith("a")


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else name
