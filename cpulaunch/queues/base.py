"""The interface of queues."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from shutil import which
from typing import NamedTuple

from cpulaunch.config.config import Config
from cpulaunch.errors import HostError
from cpulaunch.model.facts import HostFacts
from cpulaunch.model.hosts import Host
from cpulaunch.wording import cannot_run

TIMEOUT = 60.0
"""Seconds within which a queue's program must answer."""

Tell = Callable[[str], None]
"""A function that shows the user a line."""


class Option(NamedTuple):
    """An option of a queue."""

    name: str  # its long form, such as --nodes, or its short form if it has no long form
    letter: str = ""  # its short form
    metavar: str = "V"  # the name of its value; empty for a switch
    help: str = ""  # its text in `submit --help`; if empty, the option is not shown there

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, self.letter) if self.letter else (self.name,)


@dataclass(frozen=True)
class Job:
    """A job to submit."""

    config: Config
    options: tuple[tuple[str, str], ...]  # the queue's, in the order typed; a switch has an empty value
    run: tuple[str, ...]  # options of `cpulaunch run`
    words: tuple[str, ...]  # the program and its arguments as typed
    no_python: bool = False
    follow: bool = False  # whether `follow` will be called

    @property
    def asked(self) -> Mapping[str, str]:
        """Option → value.  If an option was given several times, the last value is used."""
        return dict(self.options)

    @property
    def title(self) -> str:
        """The job's name: the module, or the program without directory and suffix."""
        module = self.words[0] in ("-m", "--module")
        return self.words[1] if module else PurePath(self.words[0]).stem


class Nodes(NamedTuple):
    """The nodes that a job would get.  They are assumed to be equal."""

    facts: HostFacts  # of a whole node
    what: str  # their name in messages, such as "the nodes of partition batch"


class Part(NamedTuple):
    """The part of each node that a job gets."""

    cpus: int
    warning: str = ""  # why the user may not have intended this part; else empty


@dataclass(frozen=True)
class Submitted:
    """A job in a queue."""

    id: str  # the queue's identifier
    title: str  # the name in messages, such as "Slurm job 7"
    exit_code: int = 0  # the job's exit code, if the queue's program has waited for its end


class Queue(ABC):
    """Renders a job as a document, and submits it with the queue's own program."""

    name: str
    """Its name as a value of ``--to``."""

    title: str
    """Its name in messages."""

    program: str
    """The program that submits its jobs.  The help refers to this program's documentation."""

    options: tuple[Option, ...] = ()
    """Its options.  They have precedence over options of `cpulaunch run` with the same name."""

    help = ""
    """The text of ``submit --to NAME --help`` below the options: special features and examples."""

    passes_through = False
    """Whether unknown options, written ``--name=value`` or ``--name``, are passed to the queue."""

    follows = False
    """Whether `follow` works."""

    starts_steps = False
    """Whether its jobs are allocations in which srun can start ranks on several hosts."""

    shares_files = True
    """Whether jobs can read this machine's files.  If so, `submit` checks the script and shows the plan."""

    directory_option = ""
    """The option for the job's working directory, where `submit` looks for the script and the settings."""

    log_option = ""
    """The option for the job's log.  ``--output`` with a pattern (``%``) means this option."""

    def available(self) -> bool:
        """Whether the queue's program is installed."""
        return which(self.program) is not None

    def prepare(self, job: Job) -> Job:
        """Add options that follow from the job's settings and other options.

        Raises UsageError or ConfigError for mistakes that the queue would not report.
        """
        return job

    def hosts(self, job: Job, cpus: int | None) -> tuple[Host, ...]:
        """The requested hosts, with their numbers of ranks if the options set them.

        ``cpus`` is the number of CPUs of a node; None if unknown.
        """
        nnodes = job.config.hosts.nnodes
        return tuple(
            Host(f"node{number}") for number in range(1, 1 + (1 if nnodes == "all" else nnodes.most))
        )

    def nodes(self, job: Job) -> Nodes | None:
        """The nodes that the job would get; None if unknown.  Raises HostError."""
        return None

    def part(self, job: Job, cpus: int | None) -> Part | None:
        """The requested part of each node; None for whole nodes.  ``cpus`` is as in `hosts`."""
        return None

    @abstractmethod
    def render(self, job: Job) -> str:
        """Return the document to submit, such as a batch script or a manifest.  Raises UsageError."""

    @abstractmethod
    def submit(self, document: str, tell: Tell) -> Submitted:
        """Submit ``document`` from the job's working directory.  Raises HostError."""

    def watch(self, job: Submitted) -> Sequence[str]:
        """Lines about how to watch the job.  The first line is shown after the job's title."""
        return ()

    def follow(self, job: Submitted, tell: Tell) -> int:
        """Show the job's output and state until it has ended, and return its exit code.

        Raises HostError if the queue doesn't know the job.
        """
        raise NotImplementedError


def call(
    argv: Sequence[str], *, text: str = "", hint: str | None = None, timeout: float | None = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run a queue's program with ``text`` as its stdin, and return its exit code and output.

    Raises HostError with ``hint`` if the program can't be run, or if it takes longer than ``timeout``
    seconds.
    """
    program = argv[0]
    try:
        return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=timeout)
    except OSError as e:
        raise HostError(cannot_run(program, e), hint=hint) from None
    except subprocess.TimeoutExpired:
        raise HostError(f"{program} has not answered within {timeout:.0f} s") from None
