"""The one table of settings.

Everything that knows about settings reads this table: the command line's options, the check of
YAML files, ``config show``, the wizard and ``docs/settings.md``.  To add a setting, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpulaunch import variables
from cpulaunch.config.kinds import Choice, Kind, Number, Numbers, Ranks, Switch, Text, Variables, Words


@dataclass(frozen=True)
class Ask:
    """How the wizard asks for a setting: at which place, and in one line why it matters and what the
    default means."""

    place: int
    question: str
    why: str


@dataclass(frozen=True)
class Setting:
    """One setting.

    ``flags`` are its options of ``cpulaunch run``; ``variable`` is the name by which the field
    already knows it, if there is one: set in the environment, it counts as the user's wish.
    ``built`` lists the values that work today, where others of its kind are still to come.
    ``ask`` is for those that the wizard asks for one by one; it offers the others at its end.
    ``rank_variable`` is the variable by which ranks are told its value, where they are.
    """

    key: str
    kind: Kind
    default: Any
    help: str
    flags: tuple[str, ...] = ()
    variable: str | None = None
    built: tuple[Any, ...] | None = None
    ask: Ask | None = None
    rank_variable: str | None = None

    @property
    def section(self) -> str:
        """``"ccl"`` for ``ccl.worker_count``; ``""`` for a setting of the top level."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The key within its section."""
        return self.key.rpartition(".")[2]

    @property
    def environment_name(self) -> str:
        """Our own variable for it, such as ``CPULAUNCH_CCL_WORKER_COUNT``."""
        return "CPULAUNCH_" + self.key.upper().replace(".", "_")


SCHEMA = 1

SECTIONS = {
    "": "How ranks are started",
    "hosts": "Where they run, and how many",
    "mpi": "Which MPI starts them",
    "ccl": "oneCCL's collectives",
    "cpu": "Cores, memory, threads",
    "training": "Backend and precision",
    "watch": "Watching the job",
    "output": "Logs and terminal",
}

_TABLE = (
    Setting(
        "launcher",
        Choice("auto", "local", "mpirun", "slurm"),
        "auto",
        "how ranks are started: by this process, or by mpiexec; auto takes local for this machine alone",
        ("--launcher",),
        built=("auto", "local", "mpirun"),
    ),
    Setting(
        "hosts.hostfile",
        Text("FILE"),
        "",
        "file with one host a line: host, host:N or host slots=N; a relative path begins where cpulaunch is started",
        ("--hostfile", "-f"),
        ask=Ask(
            1,
            "Where should the ranks run?",
            "Several machines are named in a hostfile and started through MPI over ssh.",
        ),
    ),
    Setting("hosts.list", Text("a,b:2"), "", "the hosts, in place of a hostfile", ("--hosts",)),
    Setting("hosts.exclude", Text("LIST"), "", "hosts of the hostfile to leave out", ("--exclude",)),
    Setting(
        "hosts.nnodes", Number(1, "all"), "all", "how many of the hosts to use, the first ones", ("--nnodes",)
    ),
    Setting(
        "hosts.nproc_per_node",
        Number(1, "auto"),
        "auto",
        "ranks per host; auto takes the hostfile's slots, else one rank per NUMA node",
        ("--nproc-per-node", "-ppn"),
        ask=Ask(
            4,
            "How many ranks per host?",
            "One per NUMA node keeps memory close.  auto: the hostfile's slots, or that.",
        ),
    ),
    Setting(
        "hosts.nproc", Number(1, "auto"), "auto", "ranks in all, divided evenly over the hosts", ("-n", "-np")
    ),
    Setting(
        "hosts.master_addr",
        Text("ADDR"),
        "auto",
        "address that the ranks meet at; auto: the first host",
        ("--master-addr",),
        "MASTER_ADDR",
    ),
    Setting(
        "hosts.master_port",
        Number(1, "auto", maximum=65535, metavar="PORT"),
        "auto",
        "TCP port that the ranks meet at; auto: a free one",
        ("--master-port",),
        "MASTER_PORT",
    ),
    Setting(
        "hosts.oversubscribe",
        Switch(),
        False,
        "allow more ranks than cores; ranks then share cores",
        ("--oversubscribe",),
    ),
    Setting(
        "hosts.skip_preflight",
        Switch(),
        False,
        "start without checking the hosts first",
        ("--skip-preflight",),
    ),
    Setting(
        "mpi.flavour",
        Choice("auto", "intel", "mpich", "openmpi"),
        "auto",
        "which MPI's mpiexec to use; auto: Intel MPI of this venv, else the first on PATH",
        ("--mpi",),
        ask=Ask(
            2,
            "Which MPI starts them?",
            "It only starts them: cpulaunch binds and watches.  auto: the first found.",
        ),
    ),
    Setting("mpi.path", Text("DIR|FILE"), "auto", "where its mpiexec is", ("--mpi-path",)),
    Setting("mpi.args", Words(), (), "further arguments for mpiexec", ("--mpi-args",)),
    Setting(
        "ccl.binding",
        Choice("auto", "cpulaunch", "oneccl_bind_pt"),
        "auto",
        "which ccl backend: ours, or Intel's oneccl_bind_pt",
        ("--ccl-binding",),
        rank_variable=variables.CCL_BINDING,
    ),
    Setting(
        "ccl.worker_count",
        Number(0, "auto"),
        "auto",
        "oneCCL worker threads per rank, each with a core of its own; 0: none",
        ("--ccl-worker-count",),
        "CCL_WORKER_COUNT",
        ask=Ask(
            6,
            "How many oneCCL worker threads per rank?",
            "A worker takes a core and sends meanwhile.  auto: 1; none on small ranks.",
        ),
    ),
    Setting(
        "ccl.transport",
        Choice("ofi", "mpi"),
        "ofi",
        "what oneCCL sends through",
        ("--ccl-transport",),
        "CCL_ATL_TRANSPORT",
    ),
    Setting(
        "ccl.provider",
        Text("auto|tcp|psm3|verbs"),
        "auto",
        "libfabric provider",
        ("--provider",),
        "FI_PROVIDER",
    ),
    Setting(
        "ccl.interface",
        Text("IF"),
        "auto",
        "network interface between hosts",
        ("--interface",),
        ask=Ask(
            3,
            "Which network interface connects the hosts?",
            "The wrong one hangs the job at its start.  auto: the one to the first host.",
        ),
    ),
    Setting(
        "ccl.logical_cores", Switch(), False, "put oneCCL's workers on hyperthreads", ("--ccl-logical-cores",)
    ),
    Setting(
        "cpu.cores_per_rank",
        Number(1, "auto", "max"),
        "auto",
        "physical cores of each rank, workers' cores included; max shares out leftover cores too",
        ("--cores-per-rank",),
    ),
    Setting("cpu.cores", Numbers(), "auto", "CPUs to use, such as 0-13,28", ("--cores",)),
    Setting("cpu.numa_nodes", Numbers(), "auto", "NUMA nodes to use", ("--numa-nodes",)),
    Setting("cpu.bind_numa", Switch(), False, "keep each rank within one NUMA node", ("--bind-numa",)),
    Setting(
        "cpu.logical_cores",
        Switch(),
        False,
        "give ranks the hyperthreads of their cores too",
        ("--use-logical-cores",),
    ),
    Setting("cpu.e_cores", Switch(), False, "use efficiency cores too", ("--use-e-cores",)),
    Setting(
        "cpu.strategy",
        Choice("scatter", "close"),
        "scatter",
        "spread ranks over NUMA nodes, or pack them",
        ("--strategy",),
    ),
    Setting(
        "cpu.threads",
        Number(1, "auto"),
        "auto",
        "OpenMP threads per rank; auto: one per compute core",
        ("--threads",),
        "OMP_NUM_THREADS",
    ),
    Setting(
        "cpu.lenient", Switch(), False, "only warn where a rank isn't on its planned cores", ("--lenient",)
    ),
    Setting(
        "cpu.allocator",
        Choice("auto", "tcmalloc", "jemalloc", "default"),
        "auto",
        "memory allocator to preload; auto: tcmalloc where it is installed; default: none, libc's",
        ("--allocator",),
    ),
    Setting(
        "cpu.openmp",
        Choice("auto", "intel", "default"),
        "auto",
        "OpenMP runtime: Intel's (intel-openmp) to preload, or the one that torch brings (default); auto: that",
        ("--openmp",),
    ),
    Setting(
        "training.backend",
        Choice("auto", "ccl", "gloo", "mpi"),
        "auto",
        "torch.distributed backend of the ranks",
        ("--backend",),
        built=("auto", "ccl", "gloo"),
        ask=Ask(
            5,
            "Which backend for collectives?",
            "ccl is faster, gloo works everywhere.  auto: ccl where it can be used.",
        ),
        rank_variable=variables.BACKEND,
    ),
    Setting(
        "training.precision",
        Choice("bf16", "fp32"),
        "bf16",
        "precision of the forward and backward pass; fp32 where nobody says, and the CPU has no instructions for bf16",
        ("--precision",),
        ask=Ask(
            7, "Which precision?", "bf16 is far faster on CPUs with AMX or AVX512_BF16, and slower on others."
        ),
        rank_variable=variables.PRECISION,
    ),
    Setting(
        "training.engine",
        Choice("auto", "ipex", "native"),
        "auto",
        "who does bf16: IPEX, or PyTorch itself",
        ("--engine",),
        ask=Ask(
            8, "Who does bf16?", "PyTorch itself (native), or Intel's extension.  auto: by what was measured."
        ),
        rank_variable=variables.ENGINE,
    ),
    Setting(
        "training.compile",
        Switch(),
        False,
        "torch.compile the models of prepare",
        ("--compile",),
        rank_variable=variables.COMPILE,
    ),
    Setting(
        "training.compress_gradients",
        Choice("none", "bf16"),
        "none",
        "precision of gradients on the wire",
        ("--compress-gradients",),
        rank_variable=variables.COMPRESS_GRADIENTS,
    ),
    Setting(
        "training.bucket_mb",
        Number(1, "auto"),
        "auto",
        "size of DDP's gradient buckets, MB",
        ("--bucket-mb",),
        rank_variable=variables.BUCKET_MB,
    ),
    Setting(
        "training.static_graph",
        Switch(),
        False,
        "tell DDP that every step uses the same parameters in the same way",
        ("--static-graph",),
        rank_variable=variables.STATIC_GRAPH,
    ),
    Setting(
        "training.as_written",
        Switch(),
        False,
        "run scripts as they are written: don't turn their backend and precision into the planned ones",
        ("--as-written",),
        rank_variable=variables.AS_WRITTEN,
    ),
    Setting(
        "watch.heartbeat_timeout",
        Number(1, decimal=True, metavar="S"),
        30,
        "seconds without a sign of life after which a host counts as lost",
        ("--heartbeat-timeout",),
    ),
    Setting(
        "watch.grace_period",
        Number(0, decimal=True, metavar="S"),
        10,
        "seconds that ranks have to end by themselves",
        ("--grace-period",),
    ),
    Setting(
        "watch.stall_timeout",
        Number(0, decimal=True, metavar="S"),
        0,
        "seconds without progress after which a job counts as stalled; 0: never",
        ("--stall-timeout",),
        built=(0,),
    ),
    Setting(
        "watch.max_restarts",
        Number(0),
        0,
        "how often a failed job is started again",
        ("--max-restarts",),
        built=(0,),
    ),
    Setting(
        "output.log_dir",
        Text("DIR"),
        "runs",
        "directory for the jobs' own directories",
        ("--log-dir",),
        ask=Ask(
            9, "Where do logs go?", "Each job gets a directory in it: plan, command, a log per rank, outcome."
        ),
    ),
    Setting(
        "output.tee",
        Ranks(),
        "all",
        "ranks whose output is shown; equal lines of many are one unless you say all",
        ("--tee",),
    ),
    Setting("env", Variables(), {}, "environment variables for the ranks", ("--env",)),
    Setting("forward", Words(), (), "names of variables to hand on to the ranks, wherever they are", ("-x",)),
)

SETTINGS: dict[str, Setting] = {setting.key: setting for setting in _TABLE}
"""All settings by key, in the order of the reference page."""
