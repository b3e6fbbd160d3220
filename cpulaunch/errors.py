"""What can go wrong, as one tree.

::

    CpulaunchError            exit code
    ├── UsageError            2   a command line that cannot be carried out
    ├── ConfigError           2   a file or value that does not fit, with its place
    ├── PlanError             2   a request that the described machines cannot fulfil
    └── HostError             3   a host, program or port that is not ready

Every error says what was wrong and where (``str(error)``), and what to do next (``error.hint``).
A traceback is for bugs of ours only: the command line prints these errors without one.
"""

from __future__ import annotations

NODE_LOST_EXIT_CODE = STALLED_EXIT_CODE = 4
"""Of a job that has lost a host, or has stalled: no error of the command, and so no class."""


SAVED_EXIT_CODE = 75
"""Of a program that ``cpulaunch.Checkpoint`` has saved and ended because of a signal: it goes on when it is
started again.  sysexits.h calls it EX_TEMPFAIL."""


class CpulaunchError(Exception):
    """Base of all errors that are not bugs of ours."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.__notes__ = [hint]  # which Python 3.11 and later show below the message


class UsageError(CpulaunchError):
    """A command line that cannot be carried out."""


class ConfigError(CpulaunchError):
    """A configuration file, hostfile, variable or flag whose content does not fit.

    ``part`` is the piece of text at fault.
    """

    def __init__(self, message: str, *, hint: str | None = None, part: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.part = part


class PlanError(CpulaunchError):
    """A request that the described machines cannot fulfil, such as more ranks than cores."""


class HostError(CpulaunchError):
    """A host, program or port that is not ready."""

    exit_code = 3
