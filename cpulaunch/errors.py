"""The tree of cpulaunch's exceptions.

::

    CpulaunchError            exit code
    ├── UsageError            2   a command line that cannot be carried out
    ├── ConfigError           2   a file or value that does not fit, with its place
    ├── PlanError             2   a request that the described machines cannot fulfil
    └── HostError             3   a host, program or port that is not ready

``str(error)`` says what is wrong and where, and ``error.hint`` what to do about it.  The command line prints
these errors without a traceback.
"""

from __future__ import annotations

NODE_LOST_EXIT_CODE = STALLED_EXIT_CODE = 4
"""Exit code of a job that has lost a host or has stalled.  There is no exception class for it."""

SAVED_EXIT_CODE = 75
"""Exit code of a program that ``cpulaunch.Checkpoint`` has saved and ended because of a signal.

sysexits.h calls this code EX_TEMPFAIL: the program resumes when it is started again.
"""


class CpulaunchError(Exception):
    """Base of all errors that are not bugs of cpulaunch."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.__notes__ = [hint]  # Python 3.11 and later show notes below the message


class UsageError(CpulaunchError):
    """A command line that cannot be carried out."""


class ConfigError(CpulaunchError):
    """A configuration file, hostfile, variable or option with an invalid value.

    ``part`` is the invalid piece of text, if known.
    """

    def __init__(self, message: str, *, hint: str | None = None, part: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.part = part


class PlanError(CpulaunchError):
    """A request that the described machines cannot fulfil, such as more ranks than cores."""


class HostError(CpulaunchError):
    """A host, program or port that is not ready."""

    exit_code = 3
