"""The batch script of a job for Slurm."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

VALUES = {
    "--account": "-A", "--acctg-freq": "", "--array": "-a", "--batch": "", "--bb": "", "--bbf": "",
    "--begin": "-b", "--chdir": "-D", "--cluster-constraint": "", "--clusters": "-M", "--comment": "",
    "--constraint": "-C", "--core-spec": "-S", "--cores-per-socket": "", "--cpu-freq": "",
    "--cpus-per-task": "-c", "--deadline": "", "--delay-boot": "", "--dependency": "-d", "--error": "-e",
    "--exclude": "", "--export": "", "--gres": "", "--hint": "", "--job-name": "-J",
    "--kill-on-invalid-dep": "", "--licenses": "-L", "--mail-type": "", "--mail-user": "", "--mem": "",
    "--mem-per-cpu": "", "--network": "", "--nice": "", "--nodefile": "-F", "--nodelist": "-w",
    "--nodes": "-N", "--ntasks": "", "--ntasks-per-core": "", "--ntasks-per-node": "",
    "--ntasks-per-socket": "", "--open-mode": "", "--partition": "-p", "--prefer": "", "--priority": "",
    "--qos": "-q", "--reservation": "", "--signal": "", "--sockets-per-node": "", "--switches": "",
    "--thread-spec": "", "--threads-per-core": "", "--time": "-t", "--time-min": "", "--tmp": "",
    "--wait-all-nodes": "", "--wckey": "",
}  # fmt: skip
"""Options of sbatch that take a value, each with its letter, where that isn't one of `cpulaunch run`."""

SWITCHES = (
    "--contiguous", "--exclusive", "--hold", "--no-kill", "--no-requeue", "--overcommit", "--reboot",
    "--requeue", "--spread-job", "--use-min-nodes",
)  # fmt: skip
"""Options of sbatch that take none."""

LOG = ("-o", "--output")
"""How sbatch calls the job's log, by a letter, which stays, and by a name, which `submit` has for itself."""

# With any of these, the user has said how much of a node the job takes.
_SHARES = ("--exclusive", "--cpus-per-task", "--mem", "--mem-per-cpu", "--ntasks", "--ntasks-per-node")

SAVING = 120
"""Seconds before its time limit in which a job saves, where the user hasn't said."""

INACCURACY = 60
"""Seconds that Slurm may send a signal too early (sbatch(1), --signal)."""

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


def batch_script(options: Sequence[str], command: Sequence[str], warned: Sequence[str] = ()) -> str:
    """The script that runs ``command`` with ``options`` of sbatch, each a word such as ``--time=2:00:00``.

    Where the job is to be requeued, it is warned before its time limit; ``warned`` are then further options
    of ``command``'s ``cpulaunch run``.
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
    full = [*command[:place], *warned, *command[place:]]
    return "\n".join([*lines, _REQUEUING.format(command=shlex.join(full))])


class Share(NamedTuple):
    """What a job asks for: the tasks on each of its nodes (0 where it doesn't say), and how many CPUs of each
    node it gets; None stands for all."""

    tasks: tuple[int, ...]
    cpus: int | None


def share(options: Mapping[str, str], cpus_of_node: int) -> Share:
    """What sbatch's ``options`` ask for, by their long names, on nodes of so many CPUs.

    What isn't a number is taken for none: sbatch will say what is wrong with it.
    """
    each = _number(options, "--cpus-per-task") or 1
    tasks, per_node = _number(options, "--ntasks"), _number(options, "--ntasks-per-node")
    if nodes := _number(options, "--nodes"):
        pass
    elif per_node and tasks:
        nodes = ceil(tasks / per_node)
    else:
        nodes = ceil(tasks * each / cpus_of_node) or 1
    if tasks:
        counts = tuple(tasks // nodes + (i < tasks % nodes) for i in range(nodes))
    else:
        counts = (per_node,) * nodes
    whole = "--exclusive" in options or not any(name in options for name in _SHARES)
    return Share(counts, None if whole else each * max(1, *counts))


def limit(options: Mapping[str, str]) -> float | None:
    """The time limit in seconds that ``--time`` sets; None without one, or where it isn't understood."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", options.get("--time", ""))
    if not found:
        return None
    days, first, second, third = (int(text or 0) for text in found.groups())
    if found[1] is None and found[4] is None:  # minutes, or minutes:seconds
        return 60 * first + second
    return 86400 * days + 3600 * first + 60 * second + third


def warned_before(options: Mapping[str, str]) -> float:
    """Seconds before its time limit in which a job that is to be requeued may get its signal."""
    said = options.get("--signal", f"@{SAVING}").partition("@")[2]
    return (int(said) if said.isdecimal() else SAVING) + INACCURACY


def _number(options: Mapping[str, str], name: str) -> int:
    """The number that an option begins with, such as 2 of ``--nodes=2-4``; 0 without one."""
    found = re.match(r"[0-9]{1,6}", options.get(name, ""))
    return int(found[0]) if found else 0


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else name
