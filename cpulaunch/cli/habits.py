"""The table of options of torchrun, accelerate, the MPIs, srun and ipexrun, which people type by habit.

An option sets one of our settings, is ignored with a line that gives the reason, or is refused with an
alternative.  Options with the same name and meaning here need no row; rarely used options have none.
``docs/coming-from.md`` is generated from the table.  Sources: ``torch/distributed/run.py`` (2.13),
``accelerate/commands/launch.py`` (1.15), ``mpiexec -help`` of Intel MPI 2021.18 and MPICH 5.0, mpirun(1) of
Open MPI 5.0, ``ipexrun --help`` of IPEX 2.8, ``torch/backends/xeon/run_cpu.py`` (2.13).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from cpulaunch.cli.main import say
from cpulaunch.config.kinds import Switch, Variables, Words
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SETTINGS
from cpulaunch.errors import UsageError

TORCHRUN, ACCELERATE, HYDRA, OPENMPI, SRUN = "torchrun", "accelerate", "Intel MPI, MPICH", "Open MPI", "srun"
MPIS = f"{HYDRA}, {OPENMPI}"
IPEXRUN, RUN_CPU = "ipexrun", "torch's run_cpu"
LAUNCH, DEEPSPEED = "torch.distributed.launch", "DeepSpeed"

Read = Callable[[str, str], "str | None"]
"""(option, value) → the text of our setting, or None for a value that means "not set" in the other program.

Raises UsageError if cpulaunch has no equivalent."""


@dataclass(frozen=True)
class Option:
    """Options with one meaning.

    ``names``: their names in the documentation of ``programs``, separated by spaces.  Hyphens and underscores
    are equivalent, and so are one dash and two dashes before a name of several letters.  ``values``: the
    number of words that follow; two words are NAME VALUE, or NAME=VALUE in one word.
    """

    programs: str
    names: str
    values: int = 1

    @property
    def metavar(self) -> str:
        """The placeholder of the value in help."""
        return "VALUE"

    @property
    def spellings(self) -> Iterator[str]:
        """Yield every spelling that the parser has to know."""
        for name in self.names.split():
            bare = name.lstrip("-")
            yield from (f"-{bare}", f"--{bare}") if len(bare) > 1 else (name,)

    def take(self, options: Namespace, name: str, value: str) -> None:
        """Store the option ``name`` with its ``value`` in ``options``.  Raises UsageError."""
        raise NotImplementedError


def as_given(option: str, value: str) -> str:
    """Return the value unchanged."""
    return value


@dataclass(frozen=True)
class Means(Option):
    """An option that sets ``key``; ``read`` converts its value, or ``true``, to the setting's text."""

    key: str = ""
    read: Read = as_given

    @property
    def metavar(self) -> str:
        return "NAME VALUE" if self.values == 2 else SETTINGS[self.key].kind.metavar

    def take(self, options: Namespace, name: str, value: str) -> None:
        text = self.read(name, value)
        if text is None:
            return
        # mpirun also accepts -x NAME=VALUE.
        key = "env" if self.key == "forward" and "=" in text else self.key
        options.given = [*options.given, (key, text, name)]


class AnySetting(Option):
    """An option for any setting, as KEY=VALUE."""

    @property
    def metavar(self) -> str:
        return "KEY=VALUE"

    def take(self, options: Namespace, name: str, value: str) -> None:
        key, equals, text = value.partition("=")
        if not equals:
            raise UsageError(f"{name} {value}: expected {self.metavar}",
                             hint="`cpulaunch config show` lists the keys")  # fmt: skip
        options.given = [*options.given, (key, text, f"{name} {key}")]


ANY_SETTING = AnySetting("", "--set")


@dataclass(frozen=True)
class Ignored(Option):
    """An option without effect; ``why`` is the reason."""

    values: int = 0
    why: str = ""

    def take(self, options: Namespace, name: str, value: str) -> None:
        say(f"{name} is ignored: {self.why}")


@dataclass(frozen=True)
class Refused(Option):
    """An option that is an error; ``why`` is the reason, ``instead`` the alternative."""

    why: str = ""
    instead: str = ""

    def refuse(self, typed: str) -> NoReturn:
        """Raise UsageError about the ``typed`` option."""
        raise UsageError(f"{typed}: {self.why}", hint=self.instead)


@dataclass(frozen=True)
class ForHosts(Refused):
    """An option about several hosts: an error, but ignored if the job is on one host.

    ``only``: the only value that is ignored, if it is set; other values are always an error.
    """

    only: str = ""

    def take(self, options: Namespace, name: str, value: str) -> None:
        typed = f"{name} {value}" if self.only else name
        if value != (self.only or value):
            self.refuse(typed)
        options.restricted = [*options.restricted, (self, typed)]


def always(text: str) -> Read:
    """Return a reader for a switch that stands for ``text``."""
    return lambda option, value: text


def unless(*unset: str) -> Read:
    """Return a reader that keeps all values but ``unset``, which mean "not set" in the other program."""
    return lambda option, value: None if value in unset else value


def _precision(option: str, value: str) -> str:
    words = {"no": "fp32", "bf16": "bf16"}
    if value.lower() not in words:
        raise UsageError(
            f"{option} {value}: CPUs train in bf16 or fp32", hint=f"{option} bf16, or {option} no"
        )
    return words[value.lower()]


def _compile(option: str, value: str) -> str:
    words = {"no": "false", "inductor": "true"}
    if value.lower() not in words:
        raise UsageError(f"{option} {value}: models are compiled with torch's own backend, inductor",
                         hint="--compile, for models given to cpulaunch.prepare")  # fmt: skip
    return words[value.lower()]


def _numa(option: str, value: str) -> str:
    if value != "node":
        raise UsageError(f"{option} {value}: ranks can be kept within a NUMA node only",
                         hint="--bind-numa, or --cores-per-rank N")  # fmt: skip
    return "true"


def read_ranks_per_node(option: str, value: str) -> str:
    """Return a number of ranks, or auto.  Raises UsageError for torchrun's device types."""
    if value in ("cpu", "gpu", "xpu"):
        raise UsageError(f"{option} {value}: the number of ranks doesn't depend on devices",
                         hint=f"{option} auto starts one rank per NUMA node; or set a number")  # fmt: skip
    return value


def read_instance(option: str, value: str) -> str:
    """Return the number of an instance, or all for -1.  Raises UsageError for ipexrun's lists."""
    if "," in value:
        raise UsageError(f"{option} {value}: cpulaunch starts one instance, or all instances",
                         hint="start a job for each instance, or leave it out")  # fmt: skip
    return "all" if value == "-1" else value


def read_tee(option: str, value: str) -> str:
    """Return the ranks whose output is shown.  Raises UsageError for torchrun's streams of ranks."""
    if ":" in value:
        raise UsageError(f"{option} {value}: expected ranks, whose stdout and stderr are both shown",
                         hint="leave it out to show every rank, or name ranks, such as 0,4-7")  # fmt: skip
    return value


LATENCY, THROUGHPUT, MULTI = "--latency-mode", "--throughput-mode", "--multi-instance"

_LOW_LATENCY = (
    "MALLOC_CONF=oversize_threshold:1,background_thread:false,metadata_thp:always,"
    "dirty_decay_ms:-1,muzzy_decay_ms:-1"
)
"""ipexrun's jemalloc configuration for benchmarks."""

_NAME_HOSTS = (
    "leave it out, and start one `cpulaunch run` for all hosts: in a queue's job it knows the hosts, "
    "elsewhere -f HOSTFILE or --hosts a,b names them"
)
_OUTPUT = "each rank's output is in the file rank-N.log of the job's directory"
_OUTPUT_OF_INSTANCES = "each instance's output is in the file instance-N.log of the job's directory"
_OUTPUT_OPTIONS = "--log-dir D sets the directory; --tee RANKS selects the ranks to show"
_LABELS = "if there are several ranks, every line begins with its rank"
_OPTIMIZE = (
    "call ipex.optimize in the script, as examples/inference/bert.py does; options of the script come after "
    "the script"
)
TABLE: tuple[Means | Ignored | Refused, ...] = (
    # ---- how many ranks, and where
    Means(ACCELERATE, "--num-processes", key="hosts.nproc"),
    Means(MPIS, "-np --n", key="hosts.nproc"),
    Means(SRUN, "--ntasks", key="hosts.nproc"),
    Means(ACCELERATE, "--num-machines", key="hosts.nnodes"),
    Means(SRUN, "--nodes", key="hosts.nnodes"),
    Means(DEEPSPEED, "--num-nodes", key="hosts.nnodes"),
    Means(HYDRA, "-perhost", key="hosts.nproc_per_node"),
    Means(OPENMPI, "-N --npernode", key="hosts.nproc_per_node"),
    Means(SRUN, "--ntasks-per-node", key="hosts.nproc_per_node"),
    Means(IPEXRUN, "--nprocs-per-node", key="hosts.nproc_per_node"),
    Means(DEEPSPEED, "--num-accelerators --num-gpus", key="hosts.nproc_per_node"),
    Means(OPENMPI, "--pernode", values=0, key="hosts.nproc_per_node", read=lambda option, value: "1"),
    Means(ACCELERATE, "--mpirun-hostfile", key="hosts.hostfile"),
    Means(MPIS, "-hostfile -machinefile -machine --default-hostfile", key="hosts.hostfile"),
    Means(MPIS, "-H --host -hosts", key="hosts.list"),
    Means(SRUN, "--nodelist", key="hosts.list"),
    Means(ACCELERATE, "--main-process-ip", key="hosts.master_addr"),
    Means(ACCELERATE, "--main-process-port", key="hosts.master_port"),
    Means(HYDRA, "-iface", key="ccl.interface"),
    Means(ACCELERATE, "--mpirun-ccl", key="ccl.worker_count"),
    Ignored(TORCHRUN, "--standalone", why="a job on one machine needs no rendezvous anyway"),
    Ignored(ACCELERATE, "--same-network", why="ssh reaches hosts in any network"),
    Ignored(DEEPSPEED, "--bind-cores-to-rank", why="ranks are bound to cores anyway"),
    Ignored(OPENMPI, "--nooversubscribe", why="ranks never share cores, unless --oversubscribe is given"),
    Ignored(OPENMPI, "--allow-run-as-root", why="root may run jobs anyway"),
    ForHosts(f"{TORCHRUN}, {ACCELERATE}", "--rdzv-backend --rdzv-conf --rdzv-endpoint --rdzv-id",
             why="no rendezvous service is needed, as one `cpulaunch run` starts all hosts",
             instead=_NAME_HOSTS),
    ForHosts(f"{TORCHRUN}, {ACCELERATE}", "--node-rank --machine-rank", only="0",
             why="one `cpulaunch run` starts all hosts, and numbers them in the order of the hostfile",
             instead=_NAME_HOSTS),
    Refused(TORCHRUN, "--local-addr",
            why="each host's address is detected", instead="--interface IF names a card"),
    Refused(MPIS, "-nolocal",
            why="ranks run on the listed hosts, and on no others", instead="--exclude HOST leaves one out"),
    Refused(f"{OPENMPI}, {SRUN}", "-c --cpus-per-task",
            why="it is ambiguous: ranks for Open MPI, cores of each rank for srun",
            instead="-n N sets the ranks, --cores-per-rank N the cores"),
    # ---- instances
    Means(f"{IPEXRUN}, {RUN_CPU}", "--ninstances", key="instances.count", read=unless("-1", "0")),
    Means(f"{IPEXRUN}, {RUN_CPU}", f"{THROUGHPUT} {MULTI}", values=0, key="instances.count",
          read=always("auto")),
    Means(f"{IPEXRUN}, {RUN_CPU}", "--ncores-per-instance", key="instances.cores_per_instance",
          read=unless("-1", "0")),
    Means(f"{IPEXRUN}, {RUN_CPU}", LATENCY, values=0, key="instances.cores_per_instance",
          read=always("4")),
    Means(IPEXRUN, "--instance-idx", key="instances.only", read=read_instance),
    Means(RUN_CPU, "--rank", key="instances.only", read=read_instance),
    Means(f"{IPEXRUN}, {RUN_CPU}", "--skip-cross-node-cores", values=0, key="cpu.bind_numa"),
    Refused(IPEXRUN, "--auto-ipex --dtype",
            why="the script runs unchanged, while ipexrun rewrites it to call ipex.optimize",
            instead=_OPTIMIZE),
    Ignored(IPEXRUN, "--multi-task-manager", values=1, why="instances are bound without such a program"),
    # ---- environment and directory
    Means(HYDRA, "-genv -env", values=2, key="env"),
    Ignored(HYDRA, "-genvall -envall", why="the ranks get this environment anyway"),
    Ignored(HYDRA, "-genvlist -envlist", values=1, why="the ranks get this whole environment anyway"),
    # ---- what a rank does
    Means(ACCELERATE, "--mixed-precision", key="training.precision", read=_precision),
    Means(ACCELERATE, "--num-cpu-threads-per-process", key="cpu.threads"),
    Means(ACCELERATE, "--dynamo-backend", key="training.compile", read=_compile),
    Ignored(ACCELERATE, "--cpu --use-cpu --multi-cpu", why="cpulaunch always trains on CPUs"),
    Ignored(ACCELERATE, "--enable-cpu-affinity", why="ranks are always bound to cores"),
    Ignored(LAUNCH, "--use-env", why="a script reads its local rank from $LOCAL_RANK anyway"),
    Ignored(TORCHRUN, "--run-path", why="any file may be a script"),
    Ignored(TORCHRUN, "--start-method", values=1, why="each rank is a separate program, which is not forked"),
    Ignored(f"{TORCHRUN}, {ACCELERATE}", "--role", values=1, why="ranks have no role"),
    Refused(ACCELERATE, "--use-fsdp --use-deepspeed --use-megatron-lm --use-parallelism-config "
            "--gradient-accumulation-steps --gradient-clipping", why="the script has to set this up itself",
            instead="leave it out, and set it up in the script, as by an argument of Accelerator()"),
    Refused(ACCELERATE, "--multi-gpu --gpu-ids --tpu --use-xpu", why="cpulaunch trains on CPUs",
            instead="leave it out"),
    Means(ACCELERATE, "--ipex", values=0, key="training.engine", read=always("ipex")),
    Means(IPEXRUN, "--benchmark", values=0, key="env", read=always(_LOW_LATENCY)),
    # ---- cores
    Means(IPEXRUN, "--nodes-list", key="cpu.numa_nodes"),
    Means(RUN_CPU, "--node-id", key="cpu.numa_nodes", read=unless("-1")),
    Means(IPEXRUN, "--cores-list", key="cpu.cores"),
    Means(RUN_CPU, "--core-list", key="cpu.cores"),
    Means(DEEPSPEED, "--bind-core-list", key="cpu.cores"),
    Means(IPEXRUN, "--bind-numa-node", values=0, key="cpu.bind_numa"),
    Means(RUN_CPU, "--use-logical-core", values=0, key="cpu.logical_cores"),
    Means(IPEXRUN, "--logical-cores-for-ccl", values=0, key="ccl.logical_cores"),
    Means(IPEXRUN, "--memory-allocator", key="cpu.allocator"),
    Means(RUN_CPU, "--enable-tcmalloc", values=0, key="cpu.allocator", read=always("tcmalloc")),
    Means(RUN_CPU, "--enable-jemalloc", values=0, key="cpu.allocator", read=always("jemalloc")),
    Means(RUN_CPU, "--use-default-allocator", values=0, key="cpu.allocator", read=always("default")),
    Means(IPEXRUN, "--omp-runtime", key="cpu.openmp"),
    Means(RUN_CPU, "--disable-iomp", values=0, key="cpu.openmp", read=always("default")),
    Ignored(RUN_CPU, "--disable-numactl --disable-taskset", why="ranks are bound without these programs"),
    Means(TORCHRUN, "--numa-binding", key="cpu.bind_numa", read=_numa),
    Refused(MPIS, "-bind-to -map-by --rank-by --rankfile --cpu-set --use-hwthread-cpus --report-bindings",
            why="cpulaunch itself binds ranks to cores",
            instead="--dry-run shows the placement; --cores, --cores-per-rank, --numa-nodes and --strategy "
            "change it"),
    Refused(MPIS, "-print-rank-map --display-map --display-allocation",
            why="the dry run shows the placement",
            instead="--dry-run prints the plan, and `cpulaunch topology` a picture"),
    # ---- output
    Means(RUN_CPU, "--log-path", key="output.log_dir"),
    Ignored(f"{IPEXRUN}, {RUN_CPU}", "--log-file-prefix", values=1, why=_OUTPUT_OF_INSTANCES),
    Ignored(HYDRA, "-l -prepend-rank", why=_LABELS),
    Ignored(OPENMPI, "--tag-output", why=_LABELS),
    Ignored(f"{ACCELERATE}, {OPENMPI}", "-q --quiet", why="cpulaunch prints little, and only to stderr"),
    Ignored(HYDRA, "-print-all-exitcodes", why="outcome.json in the job's directory has the exit codes"),
    Refused(f"{TORCHRUN}, {ACCELERATE}", "-t -r --redirects --local-ranks-filter",
            why=f"{_OUTPUT}, and is shown", instead=_OUTPUT_OPTIONS),
    Refused(MPIS, "-outfile-pattern -errfile-pattern --output-filename",
            why=_OUTPUT, instead=_OUTPUT_OPTIONS),
    Means(HYDRA, "-s", key="output.stdin"),
    # ---- watching
    Means(TORCHRUN, "--shutdown-timeout", key="watch.grace_period"),
    Ignored(f"{TORCHRUN}, {ACCELERATE}", "--monitor-interval",
            values=1, why="the end of a rank is detected at once"),
    Refused(OPENMPI, "--timeout", why="a job has no time limit",
            instead="timeout 3600 cpulaunch run … ends it after an hour"),
    # ---- for the MPI
    Refused(f"{IPEXRUN}, {OPENMPI}", "--extra-mpi-params --mca --prefix",
            why="it is an option of mpiexec",
            instead="pass it to mpiexec, word by word: --mpi-args=WORD --mpi-args=WORD"),
)  # fmt: skip

_OWN_VALUES: dict[str, Read] = {
    "hosts.nproc_per_node": read_ranks_per_node,
    "output.tee": read_tee,
}
"""Setting → reader, for options that cpulaunch shares with other programs."""

DIFFERENT = {
    "--tee": (f"{TORCHRUN}, {ACCELERATE}", "takes ranks, such as `0,4-7`, all or none"),
    "--nnodes": (
        TORCHRUN,
        "selects hosts of a list, and one `cpulaunch run` starts them; with MIN:MAX, the job starts on MAX "
        "hosts, and may restart on MIN",
    ),
    "--max-restarts": (
        f"{TORCHRUN}, {ACCELERATE}",
        "counts restarts without progress in between; exceptions also need `--restart-on error`",
    ),
    "--env": (ACCELERATE, "sets a variable of the ranks: NAME=VALUE"),
    "--config-file": (
        ACCELERATE,
        "takes a file of cpulaunch; `cpulaunch config import` converts accelerate's file",
    ),
    "--log-dir": (
        f"{TORCHRUN}, {ACCELERATE}",
        "contains a directory for each job; default: `runs`",
    ),
}
"""Options with another meaning in other programs: these programs, and the meaning in cpulaunch."""


Given = tuple[str, str, str]
"""A setting on the command line: its key, its text, and the option."""

_NUMBERS = ("instances.count", "instances.cores_per_instance")


def resolve(given: Sequence[Given]) -> tuple[list[Given], list[str]]:
    """Resolve conflicts of options.  Return the remaining settings, and a line about each ignored option.

    ``--latency-mode`` and ``--throughput-mode`` set the number of instances or their cores.  Raises
    UsageError if this number is also set otherwise, and if two options of other programs set different
    values.  A number of instances overrides ``--multi-instance``.
    """
    modes = list(dict.fromkeys(option for _, _, option in given if option in (LATENCY, THROUGHPUT)))
    if len(modes) > 1:
        raise UsageError(f"{' contradicts '.join(modes)}", hint="leave out one of the two")
    numbers = [each for each in given if each[0] in _NUMBERS and each[2] not in (*modes, MULTI)]
    numbers = [each for each in numbers if each[1] != "auto"]
    for mode in modes:
        for key, text, option in numbers:
            raise UsageError(f"{mode} contradicts {_option_text(option, text)}", hint=_HINTS[mode, key])
    _refuse_contradictions(given)
    counts = [_option_text(option, text) for key, text, option in numbers if key == _NUMBERS[0]]
    if not counts or not any(option == MULTI for _, _, option in given):
        return list(given), []
    left = [each for each in given if each[2] != MULTI]
    return left, [f"{MULTI} is ignored: {counts[-1]} sets the number of instances"]


_HINTS = {
    (LATENCY, "instances.count"): "--instances N --cores-per-instance 4 starts N; "
    f"{LATENCY} alone starts as many with 4 cores as fit",
    (LATENCY, "instances.cores_per_instance"): "--cores-per-instance C alone starts as many as fit",
    (THROUGHPUT, "instances.count"): "--instances N alone divides the cores evenly; "
    f"{THROUGHPUT} starts one per NUMA node",
    (THROUGHPUT, "instances.cores_per_instance"): "--cores-per-instance C alone starts as many as fit",
}


def _refuse_contradictions(given: Sequence[Given]) -> None:
    """Raise UsageError if different options of other programs set different values."""
    first: dict[str, tuple[str, str]] = {}
    for key, text, option in given:
        if option not in _FOREIGN or option == MULTI or isinstance(SETTINGS[key].kind, (Variables, Words)):
            continue
        before = first.get(key, ("", ""))
        if before[0] not in ("", option) and before[1] != text:
            raise UsageError(f"{_as_typed(*before)} contradicts {_as_typed(option, text)}",
                             hint=f"both mean {key}: leave out one of the two")  # fmt: skip
        first[key] = option, text


def _as_typed(option: str, text: str) -> str:
    return option if _FOREIGN[option].values == 0 else _option_text(option, text)


def _option_text(option: str, text: str) -> str:
    return f"{option}={text}" if option.startswith("--set ") else f"{option} {text}"


def row_of(setting: Setting[Any]) -> Means:
    """Return a row for the setting's own options."""
    values = 0 if isinstance(setting.kind, Switch) else 1
    read = _OWN_VALUES.get(setting.key, as_given)
    return Means("cpulaunch", " ".join(setting.flags), values, key=setting.key, read=read)


_OUR_FLAGS = {flag for setting in SETTINGS.values() for flag in setting.flags}
_FOREIGN = {
    name: row for row in TABLE if isinstance(row, Means) for name in row.spellings if name not in _OUR_FLAGS
}
REFUSED = {name: row for row in TABLE if type(row) is Refused for name in row.spellings}
"""Options that are always refused."""
