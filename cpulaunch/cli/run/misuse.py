"""Detects mistaken command lines: options after the script, another launcher before it or around the job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePath

from cpulaunch import launchers, plugins, variables
from cpulaunch.errors import UsageError

MAX_SCRIPT = 1 << 20
"""Bytes of a script that are searched."""

_PYTHON = re.compile(r"python[0-9.]*")
_LAUNCHERS = {
    "torchrun": (),
    "accelerate": ("launch",),
    "cpulaunch": ("run",),
    "ipexrun": ("cpu",),
    "run_cpu": (),  # torch's, a module
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "srun"), ()),
}
"""Launcher → its subcommands that start ranks."""

_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "intel_extension_for_pytorch.cpu.launch": "ipexrun",
    "torch.backends.xeon.run_cpu": "run_cpu",
}
"""Module for ``python -m`` → launcher."""

_DEVICES = ("cpu", "xpu")
"""ipexrun's first argument."""


Split = Callable[[Sequence[str]], tuple[list[str], list[str]]]
"""Splits words into options of ``cpulaunch run`` and the remaining words.  Raises UsageError."""


_SHELL = re.compile(rb"#!\s*(?:\S*/env\s+(?:-S\s+)?)?(?:\S*/)?((?:ba|da|k|z|c|tc|fi)?sh)(?=\s)[^\n]*\n")


def refuse_shell_script(shown: str, text: bytes) -> None:
    """Raise UsageError if ``text``, the start of the script, is that of a shell script."""
    found = _SHELL.match(text)
    if not found or text[found.end() :].startswith(b"'''exec"):  # a Python script that pip has written
        return
    raise UsageError(
        f"{shown} is a {found[1].decode()} script, and ranks run Python",
        hint="name the Python script that it starts, or use --no-python for other programs",
    )


def refuse_several_programs(words: Sequence[str]) -> None:
    """Raise UsageError for several programs (MPMD): a lone ``:`` and an option of mpiexec."""
    for word, option in pairwise(words):
        if word == ":" and option.lstrip("-").replace("_", "-") in _OF_PROGRAMS and option.startswith("-"):
            raise UsageError(
                f"`: {option}`: a job runs one program, so these would be arguments of {words[0]}",
                hint="the script can branch on its rank ($RANK)",
            )


_OF_PROGRAMS = ("n", "np", "c", "host", "hosts", "ppn", "env", "wdir", "H", "x", "nproc-per-node")
"""Options that may follow mpiexec's ``:``."""


def refuse_launcher(options: Sequence[str], words: Sequence[str], split: Split, command: str = "run") -> None:
    """Raise UsageError if ``words`` begin with Python or another launcher instead of a script.

    ``options``: the preceding options of the cpulaunch command ``command``.
    """
    module = words[1] if words[0] in ("-m", "--module") and len(words) > 1 else None
    program = PurePath(words[0]).name
    if module in _MODULES:
        what = f"{module} is another launcher: cpulaunch starts the ranks itself"
    elif words[0] in _DEVICES and len(words) > 1:
        what = f"{words[0]} is an argument of ipexrun, not a script: cpulaunch always runs on CPUs"
    elif _PYTHON.fullmatch(program):
        what = f"{words[0]} is not a script: cpulaunch runs the script with its own Python"
    elif program in _LAUNCHERS:
        what = f"{words[0]} is not a script: cpulaunch starts the ranks itself"
    else:
        return
    try:
        instead = [*options, *_without_launchers(words, split)]
    except UsageError as e:
        raise UsageError(f"{what}; {e}", hint=e.hint) from None
    raise UsageError(what, hint=f"type: {shlex.join(['cpulaunch', command, *instead])}")


def _without_launchers(words: Sequence[str], split: Split) -> list[str]:
    """Remove launchers and Python: ``mpirun -n 4 python train.py`` becomes ``-n 4 train.py``."""
    options: list[str] = []
    rest = list(words)
    if rest[0] in _DEVICES:
        rest[0] = "ipexrun"
    while rest:
        program = PurePath(rest[0]).name
        if _PYTHON.fullmatch(program):
            del rest[0]
            while rest and rest[0].startswith("-") and rest[0] != "-m":  # such as -u
                del rest[: 2 if rest[0] in ("-W", "-X") else 1]
        elif rest[0] in ("-m", "--module") and rest[1:2] and rest[1] in _MODULES:
            rest[:2] = [_MODULES[rest[1]]]
        elif program in _LAUNCHERS:
            del rest[0]
            if rest[:1] and rest[0] in _LAUNCHERS[program]:
                del rest[0]
            _, after = split(rest)
            options += rest[: len(rest) - len(after)]
            rest = after
        else:
            break
    return [*options, *(rest or ["train.py"])]


_REJECTION = re.compile(
    r"unrecogni[sz]ed (?:arguments?|options?)|unknown (?:command line flag|options?|arguments?)"
    r"|no such option|option .* not recognized|could not consume arg|not used by the HfArgumentParser",
    re.IGNORECASE,
)
"""Errors of argparse, jsonargparse, tyro, click, typer, optparse, absl, getopt, fire and transformers."""


def rejected_options(last_output: bytes, options: Sequence[str]) -> list[str]:
    """Return the ``options`` that a script rejects as unknown in its last output."""
    lines = [line for line in last_output.decode(errors="replace").splitlines() if _REJECTION.search(line)]
    return [option for option in options if any(_names(line, option) for line in lines)]


_READS_ARGUMENTS = re.compile(
    rb"argv|argparse|argument|\b(?:args|cli|click|typer|tyro|fire|absl|flags|hydra|docopt|optparse|getopt)\b|CLI\b",
    re.IGNORECASE,
)
"""Names of libraries that parse arguments, and usual names of their results."""


def reads_arguments(script: Path) -> bool:
    """Return whether a Python script seems to parse arguments.  True if the file cannot be read."""
    try:
        with script.open("rb") as file:
            return bool(_READS_ARGUMENTS.search(file.read(MAX_SCRIPT)))
    except OSError:
        return True


def misplaced_options(options: Sequence[str]) -> str:
    """Return a message about options of ``cpulaunch run`` that came after the script."""
    got = "it" if len(options) == 1 else "them"
    return (
        f"{', '.join(options)} came after the script, so the script got {got}: "
        "options of cpulaunch run come before the script"
    )


def _names(line: str, option: str) -> bool:
    """Return whether ``line`` names the option, with dashes or, as absl and getopt do, without."""
    bare = re.escape(option.lstrip("-"))
    return bool(re.search(rf"(?<![\w-])--{bare}(?![\w-])|(?:flag '|option --?){bare}(?![\w-])", line))


def refuse_within_a_launcher(environ: Mapping[str, str]) -> None:
    """Raise UsageError if this process is a rank, or one of several processes of srun or mpiexec."""
    if job := environ.get(variables.JOB_ID):
        raise UsageError(
            f"this is a rank of the job {job}, and each of its ranks would start another job",
            hint="start cpulaunch outside the job",
        )
    # A batch script runs outside of steps, and `srun --pty bash` starts one interactive process.
    if "SLURM_STEP_ID" in environ and "SLURM_PTY_PORT" not in environ:
        _refuse_one_of_several("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", environ)
    for name in plugins.MPIS:
        identity = launchers.load(name).identity
        _refuse_one_of_several("mpiexec", identity.rank, identity.size, environ)


def _refuse_one_of_several(program: str, rank_in: str, size_in: str, environ: Mapping[str, str]) -> None:
    rank, size = environ.get(rank_in, ""), environ.get(size_in, "")
    if rank and size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"this is process {rank} of {size} of {program} (${size_in}), and each process would start a job",
            hint=f"leave out {program}: cpulaunch itself starts the ranks on all hosts (here -n {size})",
        )
