"""The program ``cpulaunch``: runs a command, and prints errors without a traceback."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from cpulaunch import __version__
from cpulaunch.errors import CpulaunchError, HostError, UsageError
from cpulaunch.wording import did_you_mean

COMMANDS = {
    "run": "run a program on every rank",
    "submit": "submit a job to a queue: Slurm, Kubernetes",
    "tune": "find the fastest settings for a script, by short runs",
    "bench": "compare collectives of ccl and gloo on these hosts",
    "config": "write a settings file by answering questions; or show, check, import one",
    "topology": "show this machine's cores, and where ranks would run",
    "hosts": "check that the hosts are ready",
    "jobs": "list running jobs, and how earlier jobs ended",
    "logs": "show the output of a job's ranks",
    "report": "write a report about a job, as one HTML file",
    "stacks": "show what every rank of a running job is doing",
    "profile": "trace steps of a running job, and summarize them",
    "env": "print versions and settings, to paste into an issue",
    "ccl": "build the process group ccl, or show its state",
}

MODULES = {
    "run": "run.command",
    "submit": "submit.command",
    "config": "config.command",
    **{name: f"jobs.{name}" for name in ("jobs", "logs", "report", "stacks", "profile")},
}
"""Command → its module in this package, if it has another name."""

_FILE_ERRORS = (
    errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.ENOTDIR,
    errno.ESTALE, errno.EIO,
)  # fmt: skip
"""Errors of file systems, which are reported without a traceback even if Python doesn't name the file."""

MAX_ERROR = 4000
"""Maximum characters of an error message; a message may quote a whole file."""

HELP = f"""\
usage: cpulaunch COMMAND [OPTIONS]

Run PyTorch training on CPU clusters: place the ranks, connect them, and watch them.

{chr(10).join(f"  {name:10} {what}" for name, what in COMMANDS.items())}

  --version  --help      `cpulaunch COMMAND --help` shows its options

example: cpulaunch run -n 2 train.py --lr 0.1
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(arguments)
    except CpulaunchError as e:
        say_error(e)
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Otherwise, Python would print another error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as e:
        if e.filename is None and e.errno not in _FILE_ERRORS:
            raise
        error = _file_error(e)
        say_error(error)
        return error.exit_code


def entry() -> NoReturn:
    """Run the program ``cpulaunch``; exit without Python's teardown, which takes 10 ms."""
    gc.disable()  # saves 5 ms; `execute` enables it again
    for fd in (0, 1, 2):  # if one is closed, as by `>&-`, the next open(2) would reuse its number
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _raise_exit)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")
    code = main()
    if not sys.stdout or not sys.stderr:
        os._exit(code)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as e:  # the disk is full
        say_error(HostError(f"stdout: {e.strerror}"))
        code = code or HostError.exit_code
    with contextlib.suppress(OSError):  # the disk is full, or the terminal is gone
        sys.stderr.flush()
    os._exit(code)


def _raise_exit(number: int, frame: object) -> None:
    """Exit by an exception, so that context managers end child processes and delete temporary files."""
    raise SystemExit(128 + number)


def say(line: str) -> None:
    """Print one line for the user on stderr."""
    with contextlib.suppress(OSError, ValueError):  # a closed stderr must not end the job
        if sys.stderr:  # if it is None, print() uses stdout
            print(f"cpulaunch: {line}", file=sys.stderr, flush=True)


def say_error(error: CpulaunchError) -> None:
    """Print an error and its hint on stderr."""
    text = str(error)
    say("error: " + (text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."))
    if error.hint:
        say(f"hint: {error.hint}")


def _file_error(error: OSError) -> CpulaunchError:
    """Return the error to print for an OSError about a file."""
    if error.filename is None and isinstance(error, FileNotFoundError):  # from getcwd(2)
        return HostError("the working directory has been deleted", hint="cd to one that exists")
    what = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR):  # another name is needed
        return UsageError(f"{what}{error.strerror}")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return HostError(
        f"{what}{error.strerror}",
        hint="`df -h` and `df -i` show the file system that is full" if full else None,
    )


def _command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"cpulaunch {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        hint = f"commands: {', '.join(COMMANDS)}"
        if name.startswith("-"):
            hint = f"options come after the command: cpulaunch run {shlex.join(arguments)}"
        elif name.endswith(".py") or os.path.isfile(name):
            hint = f"did you mean `cpulaunch run {shlex.join(arguments)}`?"
        raise UsageError(f"no command {name!r}{did_you_mean(name, COMMANDS)}", hint=hint)
    command: Callable[[list[str]], int] = import_module(f"cpulaunch.cli.{MODULES.get(name, name)}").main
    return command(arguments[1:])
