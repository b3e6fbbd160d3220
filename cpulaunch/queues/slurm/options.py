"""The options of sbatch, and the meaning of those that cpulaunch evaluates.

Their values are checked by sbatch itself.  Source: sbatch(1) of Slurm 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from cpulaunch.errors import UsageError
from cpulaunch.queues.base import Option

_VALUES = """
--account/-A --acctg-freq --array/-a --batch --bb --bbf --begin/-b --chdir/-D --cluster-constraint
--clusters/-M --comment --constraint/-C --container --core-spec/-S --cores-per-socket --cpu-freq
--cpus-per-gpu --cpus-per-task/-c --deadline --delay-boot --dependency/-d --distribution --error/-e --exclude
--export --export-file --extra-node-info --gid --gpu-bind --gpu-freq --gpus --gpus-per-node --gpus-per-socket
--gpus-per-task --gres --gres-flags --hint --input --job-name/-J --kill-on-invalid-dep --licenses/-L
--mail-type --mail-user --mcs-label --mem --mem-bind --mem-per-cpu --mem-per-gpu --mincpus --network
--nodefile/-F --nodelist/-w --nodes/-N --ntasks --ntasks-per-core --ntasks-per-gpu --ntasks-per-node
--ntasks-per-socket --open-mode --output/-o --partition/-p --power --prefer --priority --qos/-q --reservation
--segment --signal --sockets-per-node --switches --thread-spec --threads-per-core --time/-t --time-min --tmp
--uid --wait-all-nodes --wckey --wrap
"""
_SWITCHES = """
--contiguous --exclusive --get-user-env --hold --ignore-pbs --nice --no-kill --no-requeue --overcommit
--oversubscribe --propagate --reboot --requeue --spread-job --test-only --use-min-nodes --wait
"""

OPTIONS = (
    *(Option(*word.split("/")) for word in _VALUES.split()),
    *(Option(name, metavar="") for name in _SWITCHES.split()),
)
"""Options that need a value, which may be the next word; and options that don't, but may have one after a =.

Short forms are omitted if `cpulaunch run` has the same letter.
"""

SHARES = ("--exclusive", "--cpus-per-task", "--mem", "--mem-per-cpu", "--ntasks", "--ntasks-per-node")
"""Options by which the user sets how much of a node the job takes."""

SAVING = 120
"""Seconds before its time limit at which a job is warned to save, by default."""

INACCURACY = 60
"""Seconds by which Slurm may send a signal too early (sbatch(1), --signal)."""

LEFT_TO_SLURM = 10
"""Seconds before its time limit at which a warned job should have ended."""

SAVED_AT = {"SIGTERM": 15, "SIGUSR1": 10, "SIGUSR2": 12}
"""Signals at which programs save, with their numbers."""

_SIGNAL = re.compile(
    r"(?P<to>(?:[RB]{1,2}:)?)(?P<signal>(?:SIG)?(?P<name>[A-Z0-9]+))(?:@(?P<seconds>\d{1,5}))?", re.I
)


class Share(NamedTuple):
    """The resources that a job requests.

    ``tasks`` has the number of tasks for each node, 0 if not set.  ``cpus`` is the number of CPUs on each
    node, None for all.
    """

    tasks: tuple[int, ...]
    cpus: int | None


def share(options: Mapping[str, str], cpus_of_node: int) -> Share:
    """The resources that sbatch's ``options``, by long name, request on nodes of ``cpus_of_node`` CPUs."""
    each = number(options, "--cpus-per-task") or 1
    tasks, per_node = number(options, "--ntasks"), number(options, "--ntasks-per-node")
    if nodes := number(options, "--nodes"):
        pass
    elif per_node and tasks:
        nodes = ceil(tasks / per_node)
    else:
        nodes = ceil(tasks * each / cpus_of_node) or 1
    if tasks:
        counts = tuple(tasks // nodes + (i < tasks % nodes) for i in range(nodes))
    else:
        counts = (per_node,) * nodes
    whole = "--exclusive" in options or not says_share(options)
    return Share(counts, None if whole else each * max(1, *counts))


def says_share(options: Mapping[str, str]) -> bool:
    """Whether the user has set how much of a node the job takes.  ``--mem=0``, all memory, doesn't count."""
    return any(name in options for name in SHARES if (name, options.get(name)) != ("--mem", "0"))


def limit(options: Mapping[str, str]) -> float | None:
    """The time limit of ``--time`` in seconds; None if there is none, or if it can't be parsed."""
    text = options.get("--time", "")
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found or not text.strip("0:-"):  # for Slurm, 0 is no limit
        return None
    days, first, second, third = (int(text or 0) for text in found.groups())
    if found[1] is None and found[4] is None:  # minutes, or minutes:seconds
        return 60 * first + second
    return 86400 * days + 3600 * first + 60 * second + third


class Warned(NamedTuple):
    """How Slurm warns a job before its time limit.

    ``signal`` is the value of sbatch's --signal.  The signal comes ``seconds`` before the limit, or up to
    INACCURACY earlier.  The ranks then get ``grace`` seconds to save.
    """

    signal: str
    seconds: int
    grace: float


def warned(options: Mapping[str, str], grace: float | None, *, by_srun: bool = False) -> Warned | None:
    """How the job is warned before its time limit; None if neither --signal nor --requeue asks for that.

    ``grace`` is the grace period if the user has set it.  ``by_srun`` says that srun starts the ranks, so
    that signals for steps reach them.  Raises UsageError if the signal doesn't reach the ranks, or comes too
    late to save.
    """
    text, requeued = options.get("--signal"), "--requeue" in options
    if text is None:
        if not requeued:
            return None
        seconds = SAVING if grace is None else ceil(grace) + LEFT_TO_SLURM
        return Warned(f"B:TERM@{seconds}", seconds, seconds - LEFT_TO_SLURM if grace is None else grace)
    if not (found := _SIGNAL.fullmatch(text)):
        return None  # sbatch reports what is wrong
    signal, seconds = found["signal"], int(found["seconds"] or 60)  # Slurm's default
    if f"SIG{found['name'].upper()}" not in SAVED_AT and found["name"] not in map(str, SAVED_AT.values()):
        if not requeued:
            return None  # the user's own use of a signal
        why = f"--signal={text}: cpulaunch hands on SIGTERM, SIGUSR1 and SIGUSR2, at which a program saves"
        raise UsageError(why, hint=f"--signal=B:TERM@{seconds}")
    if "B" not in found["to"].upper() and not by_srun:
        raise UsageError(
            f"--signal={text}: without B:, Slurm sends it to srun's steps alone, and cpulaunch is in none",
            hint=f"--signal=B:{signal}@{seconds}",
        )
    if grace is None:
        grace = seconds - min(LEFT_TO_SLURM, seconds / 2)
    elif grace > seconds:
        raise UsageError(
            f"--signal={text}: Slurm ends the job {seconds} s later, while ranks have a grace period of "
            f"{grace:g} s to save",
            hint=f"--signal={found['to']}{signal}@{ceil(grace) + LEFT_TO_SLURM}, or a shorter --grace-period",
        )
    return Warned(text, seconds, grace)


def demand_time(options: Mapping[str, str], warning: Warned) -> None:
    """Raise UsageError if the time limit is so short that the job would be warned at its start.

    Such a job would be requeued again and again.
    """
    seconds, before = limit(options), warning.seconds + INACCURACY
    if seconds is None or seconds > before:
        return
    later = int(seconds - INACCURACY) // 2
    hint = f"--time={ceil(before / 60) + 1} or more"
    if later >= 2 * LEFT_TO_SLURM:
        hint += f"; or a later warning: --signal=B:TERM@{later} --grace-period={later - LEFT_TO_SLURM}"
    raise UsageError(
        f"--time={options['--time']}: Slurm may warn the job {before} s before its end, so at its start",
        hint=hint,
    )


def number(options: Mapping[str, str], name: str) -> int:
    """The number at the beginning of an option's value, such as 2 for ``--nodes=2-4``; 0 if there is none."""
    found = re.match(r"[0-9]{1,6}", options.get(name, ""))
    return int(found[0]) if found else 0
