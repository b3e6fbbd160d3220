"""The batch script of a job for Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

VALUES = {
    "--account": "-A", "--array": "-a", "--begin": "", "--chdir": "", "--clusters": "", "--comment": "",
    "--constraint": "-C", "--cpus-per-task": "-c", "--deadline": "", "--dependency": "-d", "--error": "",
    "--exclude": "", "--export": "", "--gres": "", "--hint": "", "--job-name": "-J", "--licenses": "",
    "--mail-type": "", "--mail-user": "", "--mem": "", "--mem-per-cpu": "", "--nice": "", "--nodelist": "-w",
    "--nodes": "-N", "--ntasks": "", "--ntasks-per-node": "", "--open-mode": "", "--partition": "-p",
    "--priority": "", "--qos": "-q", "--reservation": "", "--signal": "", "--switches": "",
    "--threads-per-core": "", "--time": "-t", "--time-min": "", "--tmp": "", "--wckey": "",
}  # fmt: skip
"""Options of sbatch that take a value, each with its letter, where that isn't one of `cpulaunch run`."""

SWITCHES = ("--contiguous", "--exclusive", "--hold", "--no-requeue", "--overcommit", "--requeue")
"""Options of sbatch that take none."""

# With any of these, the user has said how much of a node the job takes.
_SHARES = ("--exclusive", "--cpus-per-task", "--mem", "--mem-per-cpu", "--ntasks", "--ntasks-per-node")

SAVING = 120
"""Seconds before its time limit in which a job saves, where the user hasn't said."""

_REQUEUING = """\
{command} &
trap 'kill -TERM $!' TERM USR1 USR2
while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done  # the signal interrupts wait
if [ $code -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def batch_script(options: Sequence[str], command: Sequence[str], grace: Sequence[str] = ()) -> str:
    """The script that runs ``command`` with ``options`` of sbatch, each a word such as ``--time=2:00:00``.

    Where the job is to be requeued, it is warned before its time limit; ``grace`` are then further options
    of ``command``'s ``cpulaunch run``, with which its ranks have the time to save.
    """
    names = [option.partition("=")[0] for option in options]
    lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in options)]
    if not set(names) & set(_SHARES):
        lines.append("#SBATCH --exclusive")
    if "--requeue" not in names:
        return "\n".join([*lines, f"exec {shlex.join(command)}"]) + "\n"
    if "--signal" not in names:
        lines.append(f"#SBATCH --signal=B:TERM@{SAVING}")
    if "--open-mode" not in names:
        lines.append("#SBATCH --open-mode=append")
    place = command.index("run") + 1
    full = [*command[:place], *grace, *command[place:]]
    return "\n".join([*lines, _REQUEUING.format(command=shlex.join(full))])


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else name
