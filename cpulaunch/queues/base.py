"""The interface of queues.  ``cpulaunch submit`` uses it, and knows no queue by name."""

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
    """An option of a queue.

    ``name`` is its long form, such as ``--nodes``, or a letter if it has no long form.  ``letter`` is its
    short form.  ``metavar`` is the name of its value, empty for a switch.  ``help`` is its text in
    `submit --help`; an option without help is not shown.
    """

    name: str
    letter: str = ""
    metavar: str = "V"
    help: str = ""

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, self.letter) if self.letter else (self.name,)


@dataclass(frozen=True)
class Job:
    """A job to submit.

    ``options`` are the queue's options in the order typed, each with its value (empty for a switch).  ``run``
    are the options of `cpulaunch run`.  ``words`` are the program and its arguments as typed.  ``follow``
    says whether the job will be followed.
    """

    config: Config
    options: tuple[tuple[str, str], ...]
    run: tuple[str, ...]
    words: tuple[str, ...]
    no_python: bool = False
    follow: bool = False

    @property
    def asked(self) -> Mapping[str, str]:
        """Option → value.  If an option was given several times, the last value counts."""
        return dict(self.options)

    @property
    def title(self) -> str:
        """The name for the job: that of the module, or of the program without directory and suffix."""
        module = self.words[0] in ("-m", "--module")
        return self.words[1] if module else PurePath(self.words[0]).stem


class Nodes(NamedTuple):
    """The nodes that a job would get, which are taken to be equal.

    ``facts`` describe a whole node.  ``what`` names the nodes, such as ``the nodes of partition batch``.
    """

    facts: HostFacts
    what: str


class Part(NamedTuple):
    """The part of each node that a job gets: ``cpus`` CPUs.

    ``warning`` points out that the user may not have intended it; empty otherwise.
    """

    cpus: int
    warning: str = ""


@dataclass(frozen=True)
class Submitted:
    """A job in a queue.

    ``id`` is the queue's identifier of the job, and ``title`` its name for the user, such as ``Slurm job 7``.
    ``exit_code`` is the job's if the queue's program has waited for its end, else 0.
    """

    id: str
    title: str
    exit_code: int = 0


class Queue(ABC):
    """Renders a job as a document, and submits it with the queue's own program."""

    name: str
    """Its name as a value of ``--to``."""

    title: str
    """Its name in messages."""

    program: str
    """The program that submits its jobs.  Its documentation describes options that our help doesn't show."""

    options: tuple[Option, ...] = ()
    """Its options.  They take precedence over options of `cpulaunch run` with the same name."""

    help = ""
    """The text of ``submit --to NAME --help`` below the options: special features and examples."""

    passes_through = False
    """Whether unknown options, written ``--name=value`` or ``--name``, are passed to the queue."""

    follows = False
    """Whether `follow` works."""

    starts_steps = False
    """Whether its jobs are allocations in which srun can start ranks on several hosts."""

    shares_files = True
    """Whether jobs see this machine's files.  If so, `submit` checks the script and shows the plan."""

    directory_option = ""
    """The option for the job's working directory, in which `submit` then looks for script and settings."""

    log_option = ""
    """The option for the job's log.  ``--output`` with a pattern (``%``) is taken as this option."""

    def available(self) -> bool:
        """Whether its program is installed here."""
        return which(self.program) is not None

    def prepare(self, job: Job) -> Job:
        """Complete ``job`` with options that follow from its settings and options.

        Raises UsageError or ConfigError for mistakes that the queue itself would not report.
        """
        return job

    def hosts(self, job: Job, cpus: int | None) -> tuple[Host, ...]:
        """The hosts that the options request, with the number of ranks of each if the options set it.

        ``cpus`` is the number of CPUs of a node; None if unknown.
        """
        nnodes = job.config.hosts.nnodes
        return tuple(
            Host(f"node{number}") for number in range(1, 1 + (1 if nnodes == "all" else nnodes.most))
        )

    def nodes(self, job: Job) -> Nodes | None:
        """The nodes that the job would get, in order to show a plan; None if they can't be known.

        Raises HostError if the queue doesn't answer.
        """
        return None

    def part(self, job: Job, cpus: int | None) -> Part | None:
        """The part of each node that the options request; None for whole nodes.

        ``cpus`` is the number of CPUs of a node; None if unknown.
        """
        return None

    @abstractmethod
    def render(self, job: Job) -> str:
        """The document that `submit` submits, such as a batch script or a manifest.  Raises UsageError."""

    @abstractmethod
    def submit(self, document: str, tell: Tell) -> Submitted:
        """Submit ``document`` from the job's working directory.  Raises HostError."""

    def watch(self, job: Submitted) -> Sequence[str]:
        """Lines that tell the user how to watch the job.  The first one is shown after the job's title."""
        return ()

    def follow(self, job: Submitted, tell: Tell) -> int:
        """Show the job's output and state until it has ended, and return its exit code.

        Raises HostError if the queue doesn't know the job, or not any more.
        """
        raise NotImplementedError


def call(
    argv: Sequence[str], *, text: str = "", hint: str | None = None, timeout: float | None = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run a queue's program with ``text`` as its stdin, and return its exit code and output.

    Raises HostError if the program can't be run, with ``hint``, or if it takes longer than ``timeout``
    seconds.
    """
    program = argv[0]
    try:
        return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=timeout)
    except OSError as e:
        raise HostError(cannot_run(program, e), hint=hint) from None
    except subprocess.TimeoutExpired:
        raise HostError(f"{program} has not answered within {timeout:.0f} s") from None
