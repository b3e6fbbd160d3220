"""What every queue says of itself.  ``cpulaunch submit`` asks this, and knows no queue by name."""

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
"""Seconds that a queue's program may take for an answer."""

Tell = Callable[[str], None]
"""Shows the user a line."""


class Option(NamedTuple):
    """An option of a queue.

    ``name``: such as ``--nodes``, or a letter where it has no other name.  ``letter``: its short form.
    ``metavar``: what its value is called; empty for a switch.  ``help``: what `submit --help` says; an option
    without is not shown.
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
    """What is to be submitted.

    ``options``: those of the queue, each as its name and value (empty for a switch), as they were typed.
    ``run``: the options of `cpulaunch run`.  ``words``: the program and its arguments, as typed.
    ``follow``: whether it will be followed.
    """

    config: Config
    options: tuple[tuple[str, str], ...]
    run: tuple[str, ...]
    words: tuple[str, ...]
    no_python: bool = False
    follow: bool = False

    @property
    def asked(self) -> Mapping[str, str]:
        """The options by name; of one that was given several times, the last."""
        return dict(self.options)

    @property
    def title(self) -> str:
        """What to call the job: the program's or the module's name, without directory and ending."""
        module = self.words[0] in ("-m", "--module")
        return self.words[1] if module else PurePath(self.words[0]).stem


class Nodes(NamedTuple):
    """What the nodes are like that a job would get, all of them alike.

    ``cpus``: of each node.  ``facts``: one node, as far as the job may use it.  ``what``: such as ``the nodes
    of partition batch``.  ``warning``: what the user may not have meant.
    """

    cpus: int
    facts: HostFacts
    what: str
    warning: str = ""


@dataclass(frozen=True)
class Submitted:
    """A job in a queue.

    ``id``: by which the queue knows it.  ``title``: such as ``Slurm job 7``.  ``exit_code``: the job's, where
    the queue's program has waited for its end.
    """

    id: str
    title: str
    exit_code: int = 0


class Queue(ABC):
    """Turns a job into a document, and hands it to the queue's own program."""

    name: str
    """What ``--to`` calls it."""

    title: str
    """What people call it."""

    program: str
    """The program that takes its jobs; its documentation describes the options that no help of ours shows."""

    options: tuple[Option, ...] = ()
    """Its options.  Where `cpulaunch run` has one of the same name, the queue's counts."""

    help = ""
    """What ``submit --to NAME --help`` says below the options: what is special, and examples."""

    passes_through = False
    """Whether any other option, written ``--name=value`` or ``--name``, is the queue's as well."""

    follows = False
    """Whether `follow` works."""

    starts_steps = False
    """Whether its jobs are allocations in which srun starts the ranks of several hosts."""

    shares_files = True
    """Whether jobs see this machine's files: `submit` then checks the script, and shows the plan."""

    directory_option = ""
    """The option for the directory that the job runs in, where scripts and settings are then looked for."""

    log_option = ""
    """The option for the file that the job prints to.  ``--output`` with a pattern (``%``) means this one."""

    def available(self) -> bool:
        """Whether its program is installed here."""
        return which(self.program) is not None

    def prepare(self, job: Job) -> Job:
        """``job`` with what follows from its settings and options.

        Raises UsageError or ConfigError for what can't be meant, and the queue itself wouldn't refuse.
        """
        return job

    def hosts(self, job: Job, cpus: int | None) -> tuple[Host, ...]:
        """The hosts that the options ask for, with the ranks of each where the options say.

        ``cpus``: of each node; None stands for any number.
        """
        nnodes = job.config.hosts.nnodes
        return tuple(
            Host(f"node{number}") for number in range(1, 1 + (1 if nnodes == "all" else nnodes.most))
        )

    def nodes(self, job: Job) -> Nodes | None:
        """What the nodes are like, for a plan to be shown; None where nobody can say.

        Raises HostError where the queue gives no answer.
        """
        return None

    @abstractmethod
    def render(self, job: Job) -> str:
        """The document that `submit` takes: a batch script, a manifest.  Raises UsageError."""

    @abstractmethod
    def submit(self, document: str, tell: Tell) -> Submitted:
        """Hand ``document`` to the queue, from the directory that the job runs in.  Raises HostError."""

    def watch(self, job: Submitted) -> Sequence[str]:
        """How the user sees what becomes of the job: lines, of which the first is shown after its title."""
        return ()

    def follow(self, job: Submitted, tell: Tell) -> int:
        """Show what the job prints, and what becomes of it, until it has ended; returns its exit code.

        Raises HostError where the queue doesn't know it (any more).
        """
        raise NotImplementedError


def call(
    argv: Sequence[str], *, text: str = "", hint: str | None = None, timeout: float | None = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run a queue's program, which gets ``text`` to read.

    Raises HostError where there is no such program, with ``hint``, or where it doesn't end in time.
    """
    program = argv[0]
    try:
        return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=timeout)
    except OSError as e:
        raise HostError(cannot_run(program, e), hint=hint) from None
    except subprocess.TimeoutExpired:
        raise HostError(f"{program} has not answered within {timeout:.0f} s") from None
