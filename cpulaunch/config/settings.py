"""The one table of settings.

Everything that knows about settings reads this table: the command line's options, the check of
YAML files, ``config show``, the wizard and ``docs/settings.md``.  To add a setting, add a row.
"""

from __future__ import annotations

from cpulaunch import plugins, variables
from cpulaunch.config.kinds import (
    Choice,
    ChoiceOrPlugin,
    Destinations,
    Interval,
    Nodes,
    Number,
    Numbers,
    Ranks,
    Steps,
    Switch,
    Text,
    Variables,
    Words,
)
from cpulaunch.config.setting import Ask, Setting

SCHEMA = 1

SECTIONS = {
    "": "How ranks are started",
    "hosts": "Hosts and number of ranks",
    "instances": "Independent programs, instead of ranks",
    "mpi": "The MPI that starts the ranks",
    "ccl": "Collectives of the backend ccl",
    "cpu": "Cores, memory, threads",
    "training": "Backend and precision",
    "watch": "Watching the job",
    "output": "Logs and terminal",
}

# Those that ``mpirun`` doesn't stand for.
_OTHER_LAUNCHERS = [name for name in plugins.BUILT_IN[plugins.LAUNCHERS] if name not in plugins.MPIS]

_TABLE = (
    Setting(
        "launcher",
        ChoiceOrPlugin(plugins.LAUNCHERS, "auto", *_OTHER_LAUNCHERS, "mpirun"),
        "auto",
        "how ranks are started: local by cpulaunch itself, mpirun by mpiexec, slurm by srun in an allocation; auto: local if all ranks run on this machine, else mpirun, or slurm in an allocation whose nodes take no ssh",
        ("--launcher",),
    ),
    Setting(
        "hosts.hostfile",
        Text("FILE"),
        "",
        "file with one host per line: host, host:N or host slots=N; relative to the directory in which cpulaunch is started",
        ("--hostfile", "-f"),
        ask=Ask(
            1,
            "Where should the ranks run?",
            "Several machines are named in a hostfile and started through MPI over ssh.",
        ),
    ),
    Setting("hosts.list", Text("a,b:2"), "", "list of hosts, instead of a hostfile", ("--hosts",)),
    Setting("hosts.exclude", Text("LIST"), "", "hosts of the hostfile to leave out", ("--exclude",)),
    Setting(
        "hosts.nnodes",
        Nodes("all"),
        "all",
        "number of hosts to use, from the start of the list; MIN:MAX: a restart may leave out hosts that fail",
        ("--nnodes",),
    ),
    Setting(
        "hosts.nproc_per_node",
        Number(1, "auto"),
        "auto",
        "ranks per host; auto: the slots in the hostfile, else one rank per NUMA node",
        ("--nproc-per-node", "-ppn"),
        ask=Ask(
            6,
            "How many ranks per host?",
            "One per NUMA node keeps memory local.  auto: hostfile slots, else that.",
        ),
    ),
    Setting(
        "hosts.nproc",
        Number(1, "auto"),
        "auto",
        "total number of ranks, divided evenly over the hosts",
        ("-n", "-np", "--nproc"),
    ),
    Setting(
        "hosts.master_addr",
        Text("ADDR"),
        "auto",
        "address for the ranks' rendezvous; auto: the first host's",
        ("--master-addr",),
        "MASTER_ADDR",
    ),
    Setting(
        "hosts.master_port",
        Number(1, "auto", maximum=65535, metavar="PORT"),
        "auto",
        "TCP port for the ranks' rendezvous; auto: a free one",
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
        "instances.count",
        Number(1, "auto", "none"),
        "none",
        "number of instances on all hosts together, instead of ranks: independent programs without a process group; auto: one per NUMA node, or as many of instances.cores_per_instance as fit; --throughput-mode is auto",
        ("--instances",),
        ask=Ask(
            4,
            "How many independent instances, as for inference?",
            "none: the ranks of one job, as for training.  auto: one per NUMA node.",
        ),
    ),
    Setting(
        "instances.cores_per_instance",
        Number(1, "auto", "max"),
        "auto",
        "physical cores per instance; auto: the cores are shared out evenly; max: leftover cores are distributed, too; --latency-mode is 4",
        ("--cores-per-instance",),
        ask=Ask(
            5,
            "How many cores per instance?",
            "All of them: most samples a second; 4: quick answers; auto: an even share.",
        ),
    ),
    Setting(
        "instances.only",
        Number(0, "all"),
        "all",
        "number of the one instance to run, where all of them would be placed, counted from 0",
        ("--instance",),
    ),
    Setting(
        "instances.fail_fast",
        Switch(),
        False,
        "end all instances when one fails, instead of letting the others go on",
        ("--fail-fast",),
    ),
    Setting(
        "mpi.flavour",
        Choice("auto", *plugins.MPIS),
        "auto",
        "MPI whose mpiexec starts the ranks; auto: Intel MPI of this environment, else the first on PATH",
        ("--mpi",),
        ask=Ask(
            2,
            "Which MPI starts them?",
            "MPI only starts them; cpulaunch binds and watches.  auto: the first found.",
        ),
    ),
    Setting("mpi.path", Text("DIR|FILE"), "auto", "mpiexec, or the directory that it is in", ("--mpi-path",)),
    Setting("mpi.args", Words(), (), "further arguments for mpiexec, or for srun", ("--mpi-args",)),
    Setting(
        "ccl.binding",
        Choice("auto", "cpulaunch", "oneccl_bind_pt"),
        "auto",
        "implementation of the backend ccl: cpulaunch's own (auto), or Intel's oneccl_bind_pt",
        ("--ccl-binding",),
        rank_variable=variables.CCL_BINDING,
    ),
    Setting(
        "ccl.worker_count",
        Number(0, "auto"),
        "auto",
        "oneCCL worker threads per rank, each with a core of its own; auto: 1, but 0 where a rank has fewer than 4 cores",
        ("--ccl-worker-count",),
        "CCL_WORKER_COUNT",
        ask=Ask(
            8,
            "How many oneCCL worker threads per rank?",
            "A worker uses one core to communicate.  auto: 1, but 0 on small ranks.",
        ),
    ),
    Setting(
        "ccl.transport",
        Choice("auto", "tcp", "ofi", "mpi"),
        "auto",
        "transport of ccl's collectives; tcp: cpulaunch itself, by shared memory within a host and TCP between hosts; ofi, mpi: oneCCL, over libfabric (with cpulaunch's shared memory within hosts) or MPI; auto: tcp, but ofi over fast network cards of several hosts, with several oneCCL workers, or where a oneCCL algorithm is set (CCL_ALLREDUCE, CCL_BCAST, …)",
        ("--ccl-transport",),
        "CCL_ATL_TRANSPORT",
        rank_variable=variables.CCL_TRANSPORT,
        decided=("shm", "shm+tcp", "shm+ofi"),
    ),
    Setting(
        "ccl.provider",
        Text("auto|tcp|psm3|verbs"),
        "auto",
        "libfabric provider; auto: that of a network card that works on all hosts, else tcp",
        ("--provider",),
        "FI_PROVIDER",
    ),
    Setting(
        "ccl.interface",
        Text("IF"),
        "auto",
        "network interface to the other hosts; auto: on each host, the one on the route to the first host",
        ("--interface",),
        ask=Ask(
            3,
            "Which network interface connects the hosts?",
            "The wrong one makes the job hang.  auto: the route to the first host.",
        ),
    ),
    Setting(
        "ccl.logical_cores",
        Switch(),
        False,
        "run oneCCL's workers on hyperthread siblings of the ranks' cores",
        ("--ccl-logical-cores",),
    ),
    Setting(
        "cpu.cores_per_rank",
        Number(1, "auto", "max"),
        "auto",
        "physical cores per rank, including its workers' cores; max: leftover cores are distributed, too",
        ("--cores-per-rank",),
    ),
    Setting("cpu.cores", Numbers(), "auto", "CPUs to use; auto: all that this process may use", ("--cores",)),
    Setting("cpu.numa_nodes", Numbers(), "auto", "NUMA nodes to use; auto: all", ("--numa-nodes",)),
    Setting("cpu.bind_numa", Switch(), False, "keep each rank within one NUMA node", ("--bind-numa",)),
    Setting(
        "cpu.logical_cores",
        Switch(),
        False,
        "let ranks also use the hyperthread siblings of their cores",
        ("--use-logical-cores",),
    ),
    Setting("cpu.e_cores", Switch(), False, "also use efficiency cores", ("--use-e-cores",)),
    Setting(
        "cpu.strategy",
        Choice("scatter", "close"),
        "scatter",
        "scatter spreads ranks over NUMA nodes, close fills one node after another",
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
        "cpu.lenient",
        Switch(),
        False,
        "only warn if a rank does not have its planned cores, threads, memory policy or libraries",
        ("--lenient",),
    ),
    Setting(
        "cpu.allocator",
        Choice("auto", "tcmalloc", "jemalloc", "glibc", "default"),
        "auto",
        "memory allocator; glibc: its malloc, tuned to keep freed memory; "
        "auto: tcmalloc if it is installed, else glibc; default: libc's malloc as it is",
        ("--allocator",),
    ),
    Setting(
        "cpu.openmp",
        Choice("auto", "intel", "default"),
        "auto",
        "OpenMP runtime; intel: Intel's (package intel-openmp), preloaded; default and auto: the one that ships with torch",
        ("--openmp",),
    ),
    Setting(
        "training.backend",
        Choice("auto", "ccl", "gloo"),
        "auto",
        "backend of torch.distributed; auto: ccl where it can be used, else gloo",
        ("--backend",),
        ask=Ask(
            7,
            "Which backend for collectives?",
            "ccl is faster, gloo works everywhere.  auto: ccl where it can be used.",
        ),
        rank_variable=variables.BACKEND,
    ),
    Setting(
        "training.precision",
        Choice("bf16", "fp32"),
        "bf16",
        "precision of the forward and backward pass; defaults to fp32 on CPUs without bf16 instructions",
        ("--precision",),
        ask=Ask(
            9, "Which precision?", "bf16 is far faster on CPUs with AMX or AVX512_BF16, and slower on others."
        ),
        rank_variable=variables.PRECISION,
    ),
    Setting(
        "training.engine",
        ChoiceOrPlugin(plugins.ENGINES, "auto", *plugins.BUILT_IN[plugins.ENGINES]),
        "auto",
        "what computes in bf16: Intel's extension (ipex), or PyTorch itself (native); auto: the faster one, where it was measured",
        ("--engine",),
        ask=Ask(
            10,
            "Which engine for bf16?",
            "PyTorch itself (native) or Intel's extension.  auto: the faster one.",
        ),
        rank_variable=variables.ENGINE,
    ),
    Setting(
        "training.compile",
        Switch(),
        False,
        "compile the models given to cpulaunch.prepare with torch.compile",
        ("--compile",),
        rank_variable=variables.COMPILE,
    ),
    Setting(
        "training.compress_gradients",
        Choice("none", "bf16"),
        "none",
        "precision of the gradients sent between hosts; gloo and oneCCL also sum in it",
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
        "run scripts as they are written, with their own backend and precision instead of the planned ones",
        ("--as-written",),
        rank_variable=variables.AS_WRITTEN,
    ),
    Setting(
        "watch.heartbeat_timeout",
        Number(1, decimal=True, metavar="S"),
        30,
        "seconds without a heartbeat after which a host counts as lost",
        ("--heartbeat-timeout",),
    ),
    Setting(
        "watch.grace_period",
        Number(0, decimal=True, metavar="S"),
        10,
        "seconds that ranks get to end by themselves before they are killed",
        ("--grace-period",),
        rank_variable=variables.GRACE_PERIOD,
    ),
    Setting(
        "watch.stall_timeout",
        Number(0, "auto", decimal=True, metavar="S"),
        "auto",
        "seconds without progress after which a job counts as stalled; 0: never; "
        "auto: ten times the longest time so far, and at least 60",
        ("--stall-timeout",),
    ),
    Setting(
        "watch.stall_action",
        Choice("report", "abort", "restart"),
        "report",
        "what is done about a stalled job, besides showing where it is; restart: it is ended, and started "
        "again as watch.max_restarts allows",
        ("--stall-action",),
    ),
    Setting(
        "watch.max_restarts",
        Number(0),
        0,
        "how often a job that fails is started again; restarts before its last progress don't count",
        ("--max-restarts",),
    ),
    Setting(
        "watch.restart_on",
        Choice("failure", "error", "never"),
        "failure",
        "what a job is started again after; failure: signals, lost hosts, a network that failed; error: "
        "exceptions of the script and its exit codes, too",
        ("--restart-on",),
    ),
    Setting(
        "watch.restart_always",
        Switch(),
        False,
        "start a job again even if it failed before its first optimizer step",
        ("--restart-always",),
    ),
    Setting(
        "watch.restartable",
        Switch(),
        False,
        "SIGTERM, SIGUSR1 or SIGUSR2 before the first optimizer step ends the job with exit code 75, as after "
        "a save: nothing is lost, and it can be started again",
        ("--restartable",),
    ),
    Setting(
        "watch.checkpoint_every",
        Interval("auto"),
        "auto",
        "how often cpulaunch.Checkpoint saves, in steps (500) or time (90s, 10m, 2h); auto: as the script says, "
        "else every 10m",
        ("--checkpoint-every",),
        rank_variable=variables.CHECKPOINT_EVERY,
    ),
    Setting(
        "watch.telemetry",
        Destinations(),
        "file",
        "where each step's times and sizes go: file: telemetry.jsonl alone; none: nowhere; others beside the file: "
        "tensorboard, prometheus:9100 (on loopback), prometheus:ADDRESS:PORT",
        ("--telemetry",),
        rank_variable=variables.TELEMETRY,
    ),
    Setting(
        "watch.profile",
        Steps(),
        "none",
        "optimizer steps that all ranks trace by torch's profiler, counted from the start",
        ("--profile",),
    ),
    Setting(
        "output.log_dir",
        Text("DIR"),
        "runs",
        "directory in which each job gets a directory of its own",
        ("--log-dir",),
        ask=Ask(
            11,
            "Where do logs go?",
            "Each job gets a directory in it: plan, command, a log per rank, outcome.",
        ),
    ),
    Setting(
        "output.tee",
        Ranks(),
        "all",
        "ranks whose output is shown; identical lines from three or more ranks are folded into one, unless all is set explicitly",
        ("--tee",),
    ),
    Setting(
        "output.verbose",
        Switch(),
        False,
        "print more: every event, and all notes on the plan",
        ("--verbose", "-v"),
    ),
    Setting("env", Variables(), {}, "environment variables set for the ranks", ("--env",)),
    Setting(
        "forward", Words(), (), "names of variables of this environment to forward to the ranks", ("-x",)
    ),
)

SETTINGS: dict[str, Setting] = {setting.key: setting for setting in _TABLE}
"""All settings by key, in the order of the reference page."""
