"""The one table of settings.

Everything that deals with settings reads this table: the command line's options, the check of YAML files,
``config show``, the wizard and ``docs/settings.md``.  To add a setting, add a row.
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
    Nodes,
    Number,
    Numbers,
    Ports,
    Seconds,
    Sinks,
    Steps,
    Switch,
    Text,
    Variables,
    Words,
)
from cpulaunch.config.setting import Ask, Nested, Section, Setting
from cpulaunch.config.values import HostCount, Interval, PortRange, StepRange
from cpulaunch.model.cores import CoreSet

SCHEMA = 1

Auto: TypeAlias = Literal["auto"]
AllOrNone: TypeAlias = Literal["all", "none"]
Allocator: TypeAlias = Literal["auto", "tcmalloc", "jemalloc", "glibc", "default"]
Backend: TypeAlias = Literal["auto", "ccl", "gloo"]
CclBinding: TypeAlias = Literal["auto", "cpulaunch", "oneccl_bind_pt"]
Compression: TypeAlias = Literal["none", "bf16"]
OpenMP: TypeAlias = Literal["auto", "intel", "default"]
Precision: TypeAlias = Literal["auto", "bf16", "fp32"]
RestartOn: TypeAlias = Literal["failure", "error", "never"]
StallAction: TypeAlias = Literal["report", "abort", "restart"]
Strategy: TypeAlias = Literal["scatter", "close", "none"]
Transport: TypeAlias = Literal["auto", "tcp", "ofi", "oneccl", "mpi"]
DecidedTransport: TypeAlias = Literal["shm", "shm+tcp", "shm+ofi"]

# Launchers that ``mpirun`` doesn't stand for.
_OTHER_LAUNCHERS = [name for name in plugins.BUILT_IN[plugins.LAUNCHERS] if name not in plugins.MPIS]


class HostsSection(Section):
    section = "hosts"
    title = "Hosts and number of ranks"

    hostfile = Setting(
        Text("FILE"),
        "",
        "file with one host per line: host, host:N or host slots=N; relative to the directory in which cpulaunch is started",
        ("--hostfile", "-f"),
        ask=Ask(
            1,
            "Where should the ranks run?",
            "Several machines are listed in a hostfile; ssh, or an MPI, starts the ranks.",
        ),
        common=True,
    )
    list = Setting(Text("a,b:2"), "", "list of hosts, instead of a hostfile", ("--hosts",), common=True)
    exclude = Setting(Text("LIST"), "", "hosts of the hostfile to leave out", ("--exclude",))
    nnodes: Setting[HostCount | Literal["all"]] = Setting(
        Nodes("all"),
        "all",
        "number of hosts to use, from the start of the list; MIN:MAX: a restart may leave out hosts that fail",
        ("--nnodes",),
        common=True,
    )
    nproc_per_node: Setting[int | Auto] = Setting(
        Number(1, "auto"),
        "auto",
        "ranks per host; auto: the slots in the hostfile, else one rank per NUMA node",
        ("--nproc-per-node", "-ppn"),
        ask=Ask(
            6,
            "How many ranks per host?",
            "One per NUMA node keeps memory local.  auto: hostfile slots, else that.",
        ),
        common=True,
    )
    nproc: Setting[int | Auto] = Setting(
        Number(1, "auto"),
        "auto",
        "total number of ranks, divided evenly over the hosts",
        ("-n",),
        common=True,
    )
    master_addr = Setting(
        Text("ADDR"),
        "auto",
        "address for the ranks' rendezvous; auto: the first host's",
        ("--master-addr",),
        "MASTER_ADDR",
    )
    master_port: Setting[int | Auto] = Setting(
        Number(1, "auto", maximum=65535, metavar="PORT"),
        "auto",
        "TCP port for the ranks' rendezvous; auto: a free one",
        ("--master-port",),
        "MASTER_PORT",
    )
    port_range: Setting[PortRange | Auto] = Setting(
        Ports("auto"),
        "auto",
        "TCP ports on which the job listens on every host, as for a firewall; auto: any free ones",
        ("--port-range",),
        rank_variable=variables.PORT_RANGE,
    )
    oversubscribe = Setting(
        Switch(),
        False,
        "allow more ranks than cores; ranks then share cores",
        ("--oversubscribe",),
        common=True,
    )
    skip_preflight = Setting(
        Switch(),
        False,
        "start without checking the hosts first",
        ("--skip-preflight",),
    )

    @property
    def ports(self) -> range | None:
        """The ports to listen on; None if any will do."""
        return None if self.port_range == "auto" else self.port_range.ports


class InstancesSection(Section):
    section = "instances"
    title = "Independent programs, instead of ranks"

    count: Setting[int | Literal["auto", "none"]] = Setting(
        Number(1, "auto", "none"),
        "none",
        "number of independent programs on all hosts together; auto, or --throughput-mode: one per NUMA node, or as many of instances.cores_per_instance as fit",
        ("--instances",),
        ask=Ask(
            4,
            "How many independent instances, as for inference?",
            "none: one job, such as a training.  auto: a program per NUMA node.",
        ),
        common=True,
    )
    cores_per_instance: Setting[int | Literal["auto", "max"]] = Setting(
        Number(1, "auto", "max"),
        "auto",
        "physical cores per instance; auto: an even share; max: leftover cores are distributed, too; --latency-mode: 4",
        ("--cores-per-instance",),
        ask=Ask(
            5,
            "How many cores per instance?",
            "All cores: highest throughput.  4: low latency.  auto: an even share.",
        ),
        common=True,
    )
    only: Setting[int | Literal["all"]] = Setting(
        Number(0, "all"),
        "all",
        "number, from 0, of the only instance to run; its cores are those that it has when all run",
        ("--instance",),
    )
    fail_fast = Setting(
        Switch(),
        False,
        "end all instances when one fails, instead of letting the others go on",
        ("--fail-fast",),
    )


class MpiSection(Section):
    section = "mpi"
    title = "The MPI that starts the ranks"

    flavour = Setting(
        Choice("auto", *plugins.MPIS),
        "auto",
        "MPI whose mpiexec starts the ranks; auto: Intel MPI of this environment, else the first on PATH",
        ("--mpi",),
        ask=Ask(
            2,
            "Which MPI starts them?",
            "MPI only starts them; cpulaunch binds and watches.  auto: the first found.",
        ),
        common=True,
    )
    path = Setting(Text("DIR|FILE"), "auto", "mpiexec, or the directory that it is in", ("--mpi-path",))
    args: Setting[tuple[str, ...]] = Setting(
        Words("ARG"),
        (),
        "further arguments for mpiexec, or for srun",
        ("--mpi-args",),
    )


class CclSection(Section):
    section = "ccl"
    title = "Network and collectives"

    binding: Setting[CclBinding] = Setting(
        Choice(*get_args(CclBinding)),
        "auto",
        "implementation of the backend ccl: cpulaunch's own (auto), or Intel's oneccl_bind_pt",
        ("--ccl-binding",),
        rank_variable=variables.CCL_BINDING,
    )
    worker_count: Setting[int | Auto] = Setting(
        Number(0, "auto"),
        "auto",
        "cores of each rank for communication, each with a thread; auto: 0, but 1 where oneCCL carries collectives and a rank has at least 4 cores",
        ("--ccl-worker-count",),
        "CCL_WORKER_COUNT",
        ask=Ask(
            8,
            "How many cores of each rank for communication?",
            "They only communicate.  auto: 0, but 1 with oneCCL.  Measure: cpulaunch tune",
        ),
    )
    transport: Setting[Transport | DecidedTransport] = Setting(
        Choice(*get_args(Transport)),
        "auto",
        "transport of ccl's collectives; tcp, ofi: cpulaunch itself, by shared memory within a host, and TCP or libfabric between hosts; oneccl, mpi: oneCCL, over libfabric or MPI; auto: tcp, but ofi over fast network cards of several hosts, and oneccl with several oneCCL workers, or where a oneCCL algorithm is set (CCL_ALLREDUCE, CCL_BCAST, …)",
        ("--ccl-transport",),
        "CCL_ATL_TRANSPORT",
        rank_variable=variables.CCL_TRANSPORT,
        decided=get_args(DecidedTransport),
    )
    provider = Setting(
        Text("auto|tcp|psm3|verbs"),
        "auto",
        "libfabric provider; auto: that of a network card that works on all hosts, else tcp",
        ("--provider",),
        "FI_PROVIDER",
    )
    interface = Setting(
        Text("IF"),
        "auto",
        "network interface to the other hosts; auto: on each host, the one on the route to the first host",
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
        "run communication on hyperthread siblings of the ranks' cores",
        ("--ccl-logical-cores",),
    )


class CpuSection(Section):
    section = "cpu"
    title = "Cores, memory, threads"

    cores_per_rank: Setting[int | Literal["auto", "max"]] = Setting(
        Number(1, "auto", "max"),
        "auto",
        "physical cores per rank, including those for communication; max: leftover cores are distributed, too",
        ("--cores-per-rank",),
        common=True,
    )
    cores: Setting[CoreSet | Auto] = Setting(
        Numbers("LIST", "0-13,28", "auto"),
        "auto",
        "CPUs to use; auto: all that this process may use",
        ("--cores",),
        common=True,
    )
    numa_nodes: Setting[CoreSet | Auto] = Setting(
        Numbers("LIST", "0-13,28", "auto"),
        "auto",
        "NUMA nodes to use; auto: all",
        ("--numa-nodes",),
    )
    bind_numa = Setting(Switch(), False, "keep each rank within one NUMA node", ("--bind-numa",))
    logical_cores = Setting(
        Switch(),
        False,
        "also use the hyperthread siblings of the cores",
        ("--use-logical-cores",),
        common=True,
    )
    e_cores = Setting(Switch(), False, "also use efficiency cores", ("--use-e-cores",))
    strategy: Setting[Strategy] = Setting(
        Choice(*get_args(Strategy)),
        "scatter",
        "scatter spreads ranks over NUMA nodes, close fills one after another, none does not pin them",
        ("--strategy",),
    )
    threads: Setting[int | Auto] = Setting(
        Number(1, "auto"),
        "auto",
        "OpenMP threads per rank; auto: one per compute core",
        ("--threads",),
        "OMP_NUM_THREADS",
        common=True,
    )
    lenient = Setting(
        Switch(),
        False,
        "only warn if a rank does not have its planned cores, threads, memory policy or libraries",
        ("--lenient",),
    )
    allocator: Setting[Allocator] = Setting(
        Choice(*get_args(Allocator)),
        "auto",
        "memory allocator; glibc: its malloc, tuned to keep freed memory; "
        "auto: tcmalloc if it is installed, else glibc; default: libc's malloc as it is",
        ("--allocator",),
    )
    openmp: Setting[OpenMP] = Setting(
        Choice(*get_args(OpenMP)),
        "auto",
        "OpenMP runtime; intel: Intel's (package intel-openmp), preloaded; default and auto: the one that ships with torch",
        ("--openmp",),
    )


class TrainingSection(Section):
    section = "training"
    title = "Backend and precision"

    backend: Setting[Backend | Literal["none"]] = Setting(
        Choice(*get_args(Backend)),
        "auto",
        "backend of torch.distributed; auto: ccl where it can be used, else gloo",
        ("--backend",),
        ask=Ask(
            7,
            "Which backend for collectives?",
            "ccl is faster, gloo works everywhere.  auto: ccl where it can be used.",
        ),
        rank_variable=variables.BACKEND,
        common=True,
    )
    precision: Setting[Precision] = Setting(
        Choice(*get_args(Precision)),
        "auto",
        "precision of the forward and backward pass; auto: bf16 where it was measured to be 1.2 times faster than fp32, else fp32",
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
        "implementation of training steps: PyTorch with cpulaunch's kernels (native), PyTorch alone (torch), or, in bf16, Intel's extension (ipex); auto: ipex where it was measured to be faster, else native",
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
        "precision of the gradients sent between hosts; gloo and oneCCL also sum in it",
        ("--compress-gradients",),
        rank_variable=variables.COMPRESS_GRADIENTS,
    )
    bucket_mb: Setting[int | Auto] = Setting(
        Number(1, "auto"),
        "auto",
        "size of DDP's gradient buckets, MB",
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
        "end the job at the first optimizer step if there is no process group, so that each rank would train a model of its own",
        ("--strict",),
        rank_variable=variables.STRICT,
    )


class WatchSection(Section):
    section = "watch"
    title = "Watching the job"

    heartbeat_timeout: Setting[float] = Setting(
        Seconds(1),
        30,
        "seconds of silence that every host survives; one that is silent for a third longer counts as lost",
        ("--heartbeat-timeout",),
        rank_variable=variables.HEARTBEAT_TIMEOUT,
    )
    grace_period: Setting[float] = Setting(
        Seconds(0),
        10,
        "seconds that ranks get to end by themselves before they are killed",
        ("--grace-period",),
        rank_variable=variables.GRACE_PERIOD,
    )
    stall_timeout: Setting[float | Auto] = Setting(
        Seconds(0, "auto"),
        "auto",
        "seconds without progress after which a job counts as stalled; 0: never; "
        "auto: ten times the longest time so far, and at least 60",
        ("--stall-timeout",),
    )
    stall_action: Setting[StallAction] = Setting(
        Choice(*get_args(StallAction)),
        "report",
        "what to do about a stalled job, apart from reporting it; restart: as watch.max_restarts allows",
        ("--stall-action",),
        common=True,
    )
    max_restarts: Setting[int] = Setting(
        Number(0),
        0,
        "how often to restart a job that fails; the count resets when the job makes progress",
        ("--max-restarts",),
        common=True,
    )
    restart_on: Setting[RestartOn] = Setting(
        Choice(*get_args(RestartOn)),
        "failure",
        "failures after which a job is restarted; failure: signals, lost hosts, a network that failed; error: "
        "exceptions of the script and its exit codes, too",
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
        "SIGTERM, SIGUSR1 or SIGUSR2 before the first optimizer step ends the job with exit code 75, as after "
        "a save: nothing is lost, and it can be started again",
    )
    checkpoint_every: Setting[Interval | Auto] = Setting(
        Every("auto"),
        "auto",
        "how often cpulaunch.Checkpoint saves, in steps (500) or time (90s, 10m, 2h); auto: as the script says, "
        "else every 10m",
        ("--checkpoint-every",),
        rank_variable=variables.CHECKPOINT_EVERY,
        common=True,
    )
    telemetry: Setting[Sinks | Literal["none"]] = Setting(
        Destinations(),
        Sinks(),
        "destinations of each step's times and sizes; file: telemetry.jsonl; none: nowhere; in addition to the file: "
        "tensorboard, prometheus:9100 (on loopback), prometheus:ADDRESS:PORT",
        ("--telemetry",),
        rank_variable=variables.TELEMETRY,
    )
    profile: Setting[StepRange | Literal["none"]] = Setting(
        Steps(),
        "none",
        "optimizer steps that all ranks trace by torch's profiler, counted from the start",
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
        "ranks whose output is shown; identical lines from three or more ranks (on a terminal, two) are folded into one, unless all is set explicitly",
        ("--tee",),
        common=True,
    )
    stdin: Setting[int] = Setting(
        Number(0, metavar="N"),
        0,
        "rank that reads this terminal or piped input; the others have no stdin",
        ("--stdin",),
    )
    verbose = Setting(
        Switch(),
        False,
        "print more: every event, and all notes on the plan",
        ("--verbose", "-v"),
        common=True,
    )


class Table(Section):
    """All settings: those of the top level, and the sections."""

    section = ""
    title = "How ranks are started"

    launcher = Setting(
        ChoiceOrPlugin(plugins.LAUNCHERS, "auto", *_OTHER_LAUNCHERS, "mpirun"),
        "auto",
        "local: cpulaunch itself starts the ranks; ssh: agents over ssh, without an MPI; mpirun: mpiexec; slurm: srun in an allocation; auto: local if all ranks run on this machine, else slurm in an allocation, mpirun if the same MPI is on all hosts, and otherwise ssh",
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
        "environment variables set for the ranks",
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
"""The titles of all sections, by name; the top level has none."""

SETTINGS = {setting.key: setting for setting in _settings(Table)}
"""All settings by key, in the order of the reference page."""
