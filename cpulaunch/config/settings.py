"""The table of settings, in sections; some of them are in `placement_settings`.

Command-line options, the check of YAML files, ``config show``, the wizard and ``docs/settings.md`` are made
from this table.  To add a setting, add a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args

from cpulaunch import plugins, variables
from cpulaunch.config.kinds import (
    Choice,
    ChoiceOrPlugin,
    Destinations,
    Every,
    Number,
    Numbers,
    Seconds,
    Sinks,
    Steps,
    Switch,
    Text,
    Variables,
    Words,
)
from cpulaunch.config.placement_settings import Auto, CpuSection, HostsSection, InstancesSection, MpiSection
from cpulaunch.config.setting import Ask, Nested, Section, Setting
from cpulaunch.config.values import Interval, StepRange
from cpulaunch.model.cores import CoreSet

SCHEMA = 1

AllOrNone: TypeAlias = Literal["all", "none"]
Backend: TypeAlias = Literal["auto", "ccl", "gloo"]
CclBinding: TypeAlias = Literal["auto", "cpulaunch", "oneccl_bind_pt"]
Compression: TypeAlias = Literal["none", "bf16"]
Precision: TypeAlias = Literal["auto", "bf16", "fp32"]
RestartOn: TypeAlias = Literal["failure", "error", "never"]
StallAction: TypeAlias = Literal["report", "abort", "restart"]
Transport: TypeAlias = Literal["auto", "tcp", "ofi", "oneccl", "mpi"]
DecidedTransport: TypeAlias = Literal["shm", "shm+tcp", "shm+ofi"]

# All launchers but the MPIs, which share the name mpirun.
_OTHER_LAUNCHERS = [name for name in plugins.BUILT_IN[plugins.LAUNCHERS] if name not in plugins.MPIS]


class CclSection(Section):
    section = "ccl"
    title = "Network and collectives"

    binding: Setting[CclBinding] = Setting(
        Choice(*get_args(CclBinding)),
        "auto",
        "implementation of the backend ccl: cpulaunch's own (auto) or Intel's oneccl_bind_pt",
        ("--ccl-binding",),
        rank_variable=variables.CCL_BINDING,
    )
    worker_count: Setting[int | Auto] = Setting(
        Number(0, "auto"),
        "auto",
        "cores of each rank that only communicate; auto: 1 if oneCCL carries collectives and a rank has at "
        "least 4 cores, else 0",
        ("--ccl-worker-count",),
        "CCL_WORKER_COUNT",
        ask=Ask(
            8,
            "How many cores of each rank for communication?",
            "They do not compute.  auto: 0, or 1 with oneCCL.  `cpulaunch tune` measures.",
        ),
    )
    transport: Setting[Transport | DecidedTransport] = Setting(
        Choice(*get_args(Transport)),
        "auto",
        "transport of ccl's collectives; tcp, ofi: shared memory within a host, and TCP or libfabric between "
        "hosts; oneccl, mpi: oneCCL over libfabric or MPI; auto: oneccl for several workers or oneCCL's "
        "algorithms, ofi if all hosts have fast network cards, else tcp",
        ("--ccl-transport",),
        "CCL_ATL_TRANSPORT",
        rank_variable=variables.CCL_TRANSPORT,
        decided=get_args(DecidedTransport),
    )
    provider = Setting(
        Text("auto|tcp|psm3|verbs"),
        "auto",
        "libfabric provider; auto: the one for a fast network card on all hosts, else tcp",
        ("--provider",),
        "FI_PROVIDER",
    )
    interface = Setting(
        Text("IF"),
        "auto",
        "network interface to the other hosts; auto: each host's interface on the route to the first host",
        ("--interface",),
        ask=Ask(
            3,
            "Which network interface connects the hosts?",
            "The wrong one makes the job hang.  auto: the route to the first host.",
        ),
        common=True,
    )
    logical_cores = Setting(
        Switch(),
        False,
        "run communication threads on hyperthread siblings of the ranks' cores",
        ("--ccl-logical-cores",),
    )


class TrainingSection(Section):
    section = "training"
    title = "Backend and precision"

    backend: Setting[Backend | Literal["none"]] = Setting(
        Choice(*get_args(Backend)),
        "auto",
        "backend of torch.distributed; auto: ccl if it can be used, else gloo",
        ("--backend",),
        ask=Ask(
            7,
            "Which backend for collectives?",
            "ccl is faster, gloo works everywhere.  auto: ccl if it can be used.",
        ),
        rank_variable=variables.BACKEND,
        common=True,
    )
    precision: Setting[Precision] = Setting(
        Choice(*get_args(Precision)),
        "auto",
        "precision of the forward and backward pass; auto: bf16 if it is measured to be 1.2 times faster "
        "than fp32",
        ("--precision",),
        ask=Ask(
            9,
            "Which precision?",
            "bf16 is far faster on CPUs with AMX, and slower on others.  auto measures.",
        ),
        rank_variable=variables.PRECISION,
        common=True,
    )
    engine = Setting(
        ChoiceOrPlugin(plugins.ENGINES, "auto", *plugins.BUILT_IN[plugins.ENGINES]),
        "auto",
        "implementation of training steps: PyTorch with cpulaunch's kernels (native), PyTorch alone (torch), "
        "or, in bf16, Intel's extension (ipex); auto: ipex if it is measured to be faster, else native",
        ("--engine",),
        ask=Ask(
            10,
            "Which engine for bf16?",
            "PyTorch with kernels (native) or alone (torch), or Intel's extension (ipex).",
        ),
        rank_variable=variables.ENGINE,
    )
    compile = Setting(
        Switch(),
        False,
        "compile the models given to cpulaunch.prepare with torch.compile",
        ("--compile",),
        rank_variable=variables.COMPILE,
        common=True,
    )
    compress_gradients: Setting[Compression] = Setting(
        Choice(*get_args(Compression)),
        "none",
        "type in which gradients are sent between hosts; gloo and oneCCL also sum them in this type",
        ("--compress-gradients",),
        rank_variable=variables.COMPRESS_GRADIENTS,
    )
    bucket_mb: Setting[int | Auto] = Setting(
        Number(1, "auto"),
        "auto",
        "size of DDP's gradient buckets in MB",
        ("--bucket-mb",),
        rank_variable=variables.BUCKET_MB,
    )
    static_graph = Setting(
        Switch(),
        False,
        "tell DDP that every step uses the same parameters in the same way",
        ("--static-graph",),
        rank_variable=variables.STATIC_GRAPH,
    )
    as_written = Setting(
        Switch(),
        False,
        "run scripts as they are written, with their own backend and precision instead of the planned ones",
        ("--as-written",),
        rank_variable=variables.AS_WRITTEN,
    )
    strict = Setting(
        Switch(),
        False,
        "fail at the first optimizer step if ranks train separate models, without a process group",
        ("--strict",),
        rank_variable=variables.STRICT,
    )


class WatchSection(Section):
    section = "watch"
    title = "Watching the job"

    heartbeat_timeout: Setting[float] = Setting(
        Seconds(1),
        30,
        "seconds that another host may be silent; after a third more, it counts as lost",
        ("--heartbeat-timeout",),
        rank_variable=variables.HEARTBEAT_TIMEOUT,
    )
    grace_period: Setting[float] = Setting(
        Seconds(0),
        10,
        "seconds that ranks have to exit by themselves before they are killed",
        ("--grace-period",),
        rank_variable=variables.GRACE_PERIOD,
    )
    stall_timeout: Setting[float | Auto] = Setting(
        Seconds(0, "auto"),
        "auto",
        "seconds without progress after which a job counts as stalled; 0: never; "
        "auto: ten times the longest pause so far, at least 60",
        ("--stall-timeout",),
    )
    stall_action: Setting[StallAction] = Setting(
        Choice(*get_args(StallAction)),
        "report",
        "what to do with a stalled job: report it, abort it, or restart it (up to watch.max_restarts times)",
        ("--stall-action",),
        common=True,
    )
    max_restarts: Setting[int] = Setting(
        Number(0),
        0,
        "maximum number of restarts of a failed job; the count returns to 0 when the job makes progress",
        ("--max-restarts",),
        common=True,
    )
    restart_on: Setting[RestartOn] = Setting(
        Choice(*get_args(RestartOn)),
        "failure",
        "failures after which a job is restarted; failure: signals, lost hosts, network errors; error: also "
        "exceptions and exit codes of the script",
        ("--restart-on",),
        common=True,
    )
    restart_always = Setting(
        Switch(),
        False,
        "restart a job even if it failed before its first optimizer step",
    )
    restartable = Setting(
        Switch(),
        False,
        "if SIGTERM, SIGUSR1 or SIGUSR2 ends the job before its first optimizer step, exit with 75, as after "
        "a save: the job can be started again",
    )
    checkpoint_every: Setting[Interval | Auto] = Setting(
        Every("auto"),
        "auto",
        "how often cpulaunch.Checkpoint saves, in steps (500) or time (90s, 10m, 2h); auto: the script's "
        "interval, else 10m",
        ("--checkpoint-every",),
        rank_variable=variables.CHECKPOINT_EVERY,
        common=True,
    )
    telemetry: Setting[Sinks | Literal["none"]] = Setting(
        Destinations(),
        Sinks(),
        "where each step's times and sizes go: file (telemetry.jsonl) or none; in addition to the file: "
        "tensorboard, prometheus:PORT (on loopback), prometheus:ADDRESS:PORT",
        ("--telemetry",),
        rank_variable=variables.TELEMETRY,
    )
    profile: Setting[StepRange | Literal["none"]] = Setting(
        Steps(),
        "none",
        "optimizer steps, counted from 1, that all ranks trace with torch's profiler",
        ("--profile",),
        common=True,
    )


class OutputSection(Section):
    section = "output"
    title = "Logs and terminal"

    log_dir = Setting(
        Text("DIR"),
        "runs",
        "directory in which each job gets its own directory",
        ("--log-dir",),
        ask=Ask(
            11,
            "Where do logs go?",
            "Each job gets a directory in it: plan, command, a log per rank, outcome.",
        ),
        common=True,
    )
    tee: Setting[CoreSet | AllOrNone] = Setting(
        Numbers("RANKS|all|none", "0,4-7", *get_args(AllOrNone)),
        "all",
        "ranks whose output is shown; identical lines of several ranks are shown once, unless all is set "
        "explicitly",
        ("--tee",),
        common=True,
    )
    stdin: Setting[int] = Setting(
        Number(0, metavar="N"),
        0,
        "rank that gets stdin; the others have none",
        ("--stdin",),
    )
    verbose = Setting(
        Switch(),
        False,
        "print every event, and all notes on the plan",
        ("--verbose", "-v"),
        common=True,
    )


class Table(Section):
    """All settings: those at the top level, and the sections."""

    section = ""
    title = "How ranks are started"

    launcher = Setting(
        ChoiceOrPlugin(plugins.LAUNCHERS, "auto", *_OTHER_LAUNCHERS, "mpirun"),
        "auto",
        "what starts the ranks: cpulaunch itself on this machine (local), ssh, mpiexec (mpirun), or srun in "
        "an allocation (slurm); auto: local for one machine, slurm in an allocation, mpirun if all hosts "
        "have the same MPI, else ssh",
        ("--launcher",),
        common=True,
    )
    hosts = Nested(HostsSection)
    instances = Nested(InstancesSection)
    mpi = Nested(MpiSection)
    ccl = Nested(CclSection)
    cpu = Nested(CpuSection)
    training = Nested(TrainingSection)
    watch = Nested(WatchSection)
    output = Nested(OutputSection)
    env: Setting[Mapping[str, str]] = Setting(
        Variables(),
        {},
        "environment variables to set for the ranks",
        ("--env",),
        common=True,
    )
    forward: Setting[tuple[str, ...]] = Setting(
        Words("NAME"),
        (),
        "variables of this environment to forward to the ranks",
        ("-x",),
        common=True,
    )


def _sections() -> Iterator[type[Section]]:
    yield Table
    yield from (entry.of for entry in vars(Table).values() if isinstance(entry, Nested))


def _settings(section: type[Section]) -> Iterator[Setting[Any]]:
    for entry in vars(section).values():
        if isinstance(entry, Nested):
            yield from _settings(entry.of)
        elif isinstance(entry, Setting):
            yield entry


SECTIONS = {section.section: section.title for section in _sections()}
"""Section name → title.  The name of the top level is empty."""

SETTINGS = {setting.key: setting for setting in _settings(Table)}
"""Key → setting, in the order of the reference page."""
