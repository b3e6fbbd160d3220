"""The options of sbatch, and the meaning of some of them.

sbatch itself checks the values.  Source: sbatch(1) of Slurm 22.05.
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
"""Options with a value, then switches.  A switch may have a value after ``=``.

Short forms that `cpulaunch run` also has are omitted.
"""

SHARES = ("--exclusive", "--cpus-per-task", "--mem", "--mem-per-cpu", "--ntasks", "--ntasks-per-node")
"""Options that set the job's share of a node."""

SAVE_TIME = 120
"""Default time between the warning and the job's time limit, in seconds."""

SIGNAL_INACCURACY = 60
"""Slurm may send a signal this many seconds too early (sbatch(1), --signal)."""

END_MARGIN = 10
"""Seconds between the end of a warned job and its time limit."""

SAVE_SIGNALS = {"SIGTERM": 15, "SIGUSR1": 10, "SIGUSR2": 12}
"""Signals that make programs save, and their numbers."""

_SIGNAL = re.compile(
    r"(?P<to>(?:[RB]{1,2}:)?)(?P<signal>(?:SIG)?(?P<name>[A-Z0-9]+))(?:@(?P<seconds>\d{1,5}))?", re.I
)


class Share(NamedTuple):
    """The resources that a job requests."""

    tasks: tuple[int, ...]  # number of tasks of each node; 0 if not set
    cpus: int | None  # CPUs of each node; None means all


def share(options: Mapping[str, str], cpus_of_node: int) -> Share:
    """The resources that sbatch's ``options`` request on nodes with ``cpus_of_node`` CPUs."""
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
    whole = "--exclusive" in options or not requests_share(options)
    return Share(counts, None if whole else each * max(1, *counts))


def requests_share(options: Mapping[str, str]) -> bool:
    """Whether the user has set the job's share of a node.  ``--mem=0`` means all memory."""
    return any(name in options for name in SHARES if (name, options.get(name)) != ("--mem", "0"))


def limit(options: Mapping[str, str]) -> float | None:
    """The time limit of ``--time`` in seconds; None if there is none, or if it can't be parsed."""
    text = options.get("--time", "")
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found or not text.strip("0:-"):  # 0 means no limit
        return None
    days, first, second, third = (int(text or 0) for text in found.groups())
    if found[1] is None and found[4] is None:  # minutes, or minutes:seconds
        return 60 * first + second
    return 86400 * days + 3600 * first + 60 * second + third


class TimeLimitWarning(NamedTuple):
    """The signal that Slurm sends to a job before its time limit."""

    signal: str  # the value of sbatch's --signal
    seconds: int  # before the time limit, or up to SIGNAL_INACCURACY earlier
    grace: float  # seconds that the ranks then get to save


def time_limit_warning(
    options: Mapping[str, str], grace: float | None, *, by_srun: bool = False
) -> TimeLimitWarning | None:
    """The warning before the job's time limit; None if neither --signal nor --requeue requests it.

    ``grace`` is the grace period if the user has set it.  ``by_srun``: srun starts the ranks, so they get
    signals that Slurm sends to steps.  Raises UsageError if the ranks don't get the signal, or get it too
    late to save.
    """
    text, requeued = options.get("--signal"), "--requeue" in options
    if text is None:
        if not requeued:
            return None
        seconds = SAVE_TIME if grace is None else ceil(grace) + END_MARGIN
        return TimeLimitWarning(
            f"B:TERM@{seconds}", seconds, seconds - END_MARGIN if grace is None else grace
        )
    if not (found := _SIGNAL.fullmatch(text)):
        return None  # sbatch reports the error
    signal, seconds = found["signal"], int(found["seconds"] or 60)  # Slurm's default
    if f"SIG{found['name'].upper()}" not in SAVE_SIGNALS and found["name"] not in map(
        str, SAVE_SIGNALS.values()
    ):
        if not requeued:
            return None  # the user's program handles the signal
        why = f"--signal={text}: programs save only at SIGTERM, SIGUSR1 and SIGUSR2"
        raise UsageError(why, hint=f"use --signal=B:TERM@{seconds}")
    if "B" not in found["to"].upper() and not by_srun:
        raise UsageError(
            f"--signal={text}: without B:, Slurm sends it only to srun's steps, but cpulaunch is in none",
            hint=f"use --signal=B:{signal}@{seconds}",
        )
    if grace is None:
        grace = seconds - min(END_MARGIN, seconds / 2)
    elif grace > seconds:
        raise UsageError(
            f"--signal={text}: Slurm ends the job {seconds} s later, but the grace period of the ranks is "
            f"{grace:g} s",
            hint=f"use --signal={found['to']}{signal}@{ceil(grace) + END_MARGIN} or a shorter --grace-period",
        )
    return TimeLimitWarning(text, seconds, grace)


def demand_time(options: Mapping[str, str], warning: TimeLimitWarning) -> None:
    """Raise UsageError if the job would get the warning at its start, and be requeued forever."""
    seconds, before = limit(options), warning.seconds + SIGNAL_INACCURACY
    if seconds is None or seconds > before:
        return
    later = int(seconds - SIGNAL_INACCURACY) // 2
    hint = f"use --time={ceil(before / 60) + 1} or more"
    if later >= 2 * END_MARGIN:
        hint += f", or a later warning: --signal=B:TERM@{later} --grace-period={later - END_MARGIN}"
    raise UsageError(
        f"--time={options['--time']}: Slurm may send the signal {before} s earlier, at the job's start",
        hint=hint,
    )


def number(options: Mapping[str, str], name: str) -> int:
    """The number at the beginning of an option's value, such as 2 for ``--nodes=2-4``, or 0."""
    found = re.match(r"[0-9]{1,6}", options.get(name, ""))
    return int(found[0]) if found else 0
