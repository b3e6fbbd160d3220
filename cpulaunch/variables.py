"""The environment variables that cpulaunch sets or reads.

Constants below have the names of cpulaunch's own variables, which are spelled nowhere else.  Other variables
are spelled in the packages that their rows list.  ``tests/test_variables.py`` checks both.

The table lacks two kinds of variables.  Variables of a single MPI or scheduler are in its module in
``launchers/``.  Each setting has a variable named after its key, such as ``CPULAUNCH_CCL_WORKER_COUNT``.

Agents and ranks import this module when they start, so it imports nothing.
"""

from __future__ import annotations

# Variables between the launcher, the agents and the ranks of one job.
CONTROL = "CPULAUNCH_CONTROL"
TOKEN = "CPULAUNCH_TOKEN"
GROUPS_KEY = "CPULAUNCH_GROUPS_KEY"
JOB_ID = "CPULAUNCH_JOB_ID"
INSTANCE = "CPULAUNCH_INSTANCE"
INSTANCES = "CPULAUNCH_INSTANCES"
LAUNCHER_PID = "CPULAUNCH_LAUNCHER_PID"
JOB_RANK = "CPULAUNCH_JOB_RANK"
RESTART_COUNT = "CPULAUNCH_RESTART_COUNT"
MAX_RESTARTS = "CPULAUNCH_MAX_RESTARTS"
PLACEMENT = ("CPULAUNCH_PLACEMENT", *(f"CPULAUNCH_PLACEMENT_{part}" for part in range(2, 9)))
REPORT_FD = "CPULAUNCH_REPORT_FD"
STACKS = "CPULAUNCH_STACKS"
OPEN_FILES = "CPULAUNCH_OPEN_FILES"
KEPT_PORT = "CPULAUNCH_KEPT_PORT"
KEPT_PORT_FD = "CPULAUNCH_KEPT_PORT_FD"
LEDGER_FD = "CPULAUNCH_LEDGER_FD"
LOCAL_IDENTITY = ("CPULAUNCH_RANK", "CPULAUNCH_SIZE", "CPULAUNCH_LOCAL_RANK", "CPULAUNCH_LOCAL_SIZE")

# Settings that are passed to the ranks (config/settings.py).
BACKEND = "CPULAUNCH_BACKEND"
PRECISION = "CPULAUNCH_PRECISION"
ENGINE = "CPULAUNCH_ENGINE"
COMPILE = "CPULAUNCH_COMPILE"
COMPRESS_GRADIENTS = "CPULAUNCH_COMPRESS_GRADIENTS"
BUCKET_MB = "CPULAUNCH_BUCKET_MB"
STATIC_GRAPH = "CPULAUNCH_STATIC_GRAPH"
AS_WRITTEN = "CPULAUNCH_AS_WRITTEN"
CCL_BINDING = "CPULAUNCH_RANK_CCL_BINDING"
PRECISION_IS_PLANNED = "CPULAUNCH_RANK_PRECISION_IS_PLANNED"
CCL_TRANSPORT = "CPULAUNCH_RANK_CCL_TRANSPORT"
PORT_RANGE = "CPULAUNCH_RANK_PORT_RANGE"
CHECKPOINT_EVERY = "CPULAUNCH_CHECKPOINT_EVERY"
GRACE_PERIOD = "CPULAUNCH_GRACE_PERIOD"
HEARTBEAT_TIMEOUT = "CPULAUNCH_HEARTBEAT_TIMEOUT"
TELEMETRY = "CPULAUNCH_TELEMETRY"
TUNING = "CPULAUNCH_TUNING"
STRICT = "CPULAUNCH_STRICT"

# Read by a script that was not started by cpulaunch.
SEPARATE = "CPULAUNCH_SEPARATE"

# Read by the command line.
CONFIG = "CPULAUNCH_CONFIG"


class Variable:
    """An environment variable.

    ``writers`` and ``readers`` are packages or top-level modules of cpulaunch; others are in angle brackets.
    ``encoding`` describes the format of its value.
    """

    def __init__(self, name: str, writers: str, readers: str, encoding: str, meaning: str) -> None:
        self.name = name
        self.writers = writers
        self.readers = readers
        self.encoding = encoding
        self.meaning = meaning


_SETTING = "the option's value; a switch is 1 or 0"

# fmt: off
TABLE = (
    # ---- ours
    Variable(CONTROL, "supervise", "launchers agent", "HOST:PORT or @NAME", "where the launcher listens for agents"),
    Variable(TOKEN, "supervise", "launchers agent", "hexadecimal", "secret that authenticates both ends"),
    Variable(GROUPS_KEY, "supervise", "launchers ccl", "hexadecimal", "secret that authenticates ranks to each other"),
    Variable(JOB_ID, "supervise agent", "cli launchers config runtime <script>", "text", "the job; marks its processes"),
    Variable(JOB_RANK, "agent", "runtime", "RANK/WORLD_SIZE", "the rank, even if the script changes RANK"),
    Variable(INSTANCE, "agent", "cli runtime <script>", "integer", "number of the instance, from 0"),
    Variable(INSTANCES, "agent", "cli runtime <script>", "integer", "number of instances in all"),
    Variable(LAUNCHER_PID, "supervise", "agent", "integer", "the launcher's process"),
    Variable(RESTART_COUNT, "supervise", "launchers agent runtime <script>", "integer", "how often the job was restarted"),
    Variable(MAX_RESTARTS, "supervise", "launchers agent runtime <script>", "integer", "how often the job may be restarted"),
    Variable(PLACEMENT[0], "plan", "agent plan", "JSON of plan.placement, possibly compressed", "hosts and cores of all ranks"),
    *(Variable(part, "plan", "agent plan", "text", "continues the value of the previous variable") for part in PLACEMENT[1:]),
    Variable(REPORT_FD, "agent", "agent", "integer", "descriptor on which a rank reports to its agent"),
    Variable(STACKS, "agent", "agent", "FD:SIGNAL", "the signal that makes a rank write its stacks, and the descriptor that it writes to"),
    Variable(OPEN_FILES, "supervise", "agent", "integer", "soft limit of open files for a local rank's program"),
    Variable(KEPT_PORT, "supervise agent", "supervise agent runtime", "integer", "MASTER_PORT, if the job reserves it against other users"),
    Variable(KEPT_PORT_FD, "agent", "agent", "integer", "descriptor of the socket that reserves MASTER_PORT"),
    Variable(LEDGER_FD, "agent", "agent", "integer", "descriptor of the rank's ledger"),
    Variable(LOCAL_IDENTITY[0], "launchers", "agent", "integer", "identity of a local rank"),
    Variable(LOCAL_IDENTITY[1], "launchers", "agent", "integer", "identity of a local rank"),
    Variable(LOCAL_IDENTITY[2], "launchers", "agent", "integer", "identity of a local rank"),
    Variable(LOCAL_IDENTITY[3], "launchers", "agent", "integer", "identity of a local rank"),
    Variable(BACKEND, "config plan", "config cli runtime <script>", _SETTING, "backend of torch.distributed"),
    Variable(PRECISION, "config", "config runtime <script>", _SETTING, "precision of a training step"),
    Variable(PRECISION_IS_PLANNED, "plan", "runtime tune", "1", "the plan has chosen the precision, not the user"),
    Variable(ENGINE, "config", "config runtime", _SETTING, "engine"),
    Variable(COMPILE, "config", "config runtime", _SETTING, "whether prepare compiles models"),
    Variable(COMPRESS_GRADIENTS, "config", "config runtime", _SETTING, "precision of gradients on the wire"),
    Variable(BUCKET_MB, "config", "config runtime", _SETTING, "size of DDP's buckets"),
    Variable(STATIC_GRAPH, "config", "config runtime", _SETTING, "DDP's static graph"),
    Variable(AS_WRITTEN, "config", "config agent runtime", _SETTING, "whether scripts are left unpatched"),
    Variable(CCL_BINDING, "config", "config ccl runtime", _SETTING, "implementation of ccl"),
    Variable(CCL_TRANSPORT, "config", "config ccl", _SETTING + "; or shm, shm+tcp, shm+ofi", "what carries ccl's collectives"),
    Variable(PORT_RANGE, "config", "config ccl runtime", _SETTING, "ports on which a rank may listen"),
    Variable(CHECKPOINT_EVERY, "config", "config runtime", _SETTING, "how often cpulaunch.Checkpoint saves"),
    Variable(GRACE_PERIOD, "config", "config runtime", _SETTING, "how long ranks get to end by themselves"),
    Variable(HEARTBEAT_TIMEOUT, "config launchers", "config ccl agent <ssh.sh>", _SETTING, "how long a host may be silent"),
    Variable(TELEMETRY, "config", "config runtime", _SETTING, "what telemetry records of each step"),
    Variable(TUNING, "tune", "runtime <script>", "1", "set in the trial runs of `cpulaunch tune`"),
    Variable(STRICT, "config", "config runtime", _SETTING, "whether ranks that train separate models fail"),
    Variable(SEPARATE, "<user>", "launchers runtime", "1 or 0", "whether processes of another launcher are not joined into one job"),
    Variable(CONFIG, "<user>", "cli config", "path", "the YAML file to read"),
    # ---- torch.distributed
    Variable("RANK", "agent runtime", "bench plan runtime <torch>", "integer", "rank"),
    Variable("WORLD_SIZE", "agent runtime", "bench plan runtime <torch>", "integer", "number of ranks"),
    Variable("LOCAL_RANK", "agent runtime", "bench ccl plan <torch> <oneCCL>", "integer", "rank among those of its host"),
    Variable("LOCAL_WORLD_SIZE", "agent runtime", "ccl plan runtime <torch> <oneCCL>", "integer", "number of ranks on the host"),
    Variable("GROUP_RANK", "agent", "plan <script>", "integer", "number of the host"),
    Variable("GROUP_WORLD_SIZE", "agent", "plan <script>", "integer", "number of hosts"),
    Variable("ROLE_NAME", "agent", "<script>", "default", "torchrun's role; there is only one"),
    Variable("ROLE_RANK", "agent", "<script>", "integer", "rank"),
    Variable("ROLE_WORLD_SIZE", "agent", "<script>", "integer", "number of ranks"),
    Variable("TORCHELASTIC_RUN_ID", "agent", "<torch> <script>", "text", "the job; tells libraries that ranks are started for them"),
    Variable("TORCHELASTIC_RESTART_COUNT", "agent", "<script>", "integer", "how often the job was restarted"),
    Variable("TORCHELASTIC_MAX_RESTARTS", "agent", "<script>", "integer", "how often the job may be restarted"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", "agent", "<torch>", "False", "whether the ranks' store is torchrun's"),
    Variable("MASTER_ADDR", "<user> plan runtime", "bench config agent ccl <torch>", "name or address", "where ranks meet"),
    Variable("MASTER_PORT", "<user> supervise launchers runtime", "bench config agent <torch>", "integer", "port where ranks meet"),
    Variable("PMI_RANK", "<Hydra>", "launchers ccl plan", "integer", "rank; set if Hydra started this process"),
    Variable("TORCH_DEVICE_BACKEND_AUTOLOAD", "ccl runtime", "agent <torch>", "1 or 0", "whether torch calls our entry points"),
    # ---- oneCCL, libfabric, gloo, Intel MPI as a transport
    Variable("CCL_ALLGATHERV", "<user>", "plan <oneCCL>", "algorithm", "oneCCL's algorithm for allgatherv"),
    Variable("CCL_ALLREDUCE", "<user>", "plan <oneCCL>", "algorithm", "oneCCL's algorithm for allreduce"),
    Variable("CCL_ALLTOALLV", "<user> plan", "plan <oneCCL>", "algorithm", "oneCCL's algorithm for alltoallv"),
    Variable("CCL_ATL_SHM", "plan", "<oneCCL>", "1 or 0", "shared memory within a host"),
    Variable("CCL_ATL_TRANSPORT", "<user> plan", "config ccl <oneCCL>", "ofi or mpi", "oneCCL's transport"),
    Variable("CCL_BCAST", "<user>", "plan <oneCCL>", "algorithm", "oneCCL's algorithm for broadcast"),
    Variable("CCL_KVS_IFACE", "plan", "ccl <oneCCL>", "interface", "interface for oneCCL's bootstrap"),
    Variable("CCL_LOCAL_RANK", "ccl", "<oneCCL>", "integer", "rank among those of its host"),
    Variable("CCL_LOCAL_SIZE", "ccl", "<oneCCL>", "integer", "number of ranks on the host"),
    Variable("CCL_LOG_LEVEL", "<user> plan", "ccl <oneCCL>", "error, warn, …", "what oneCCL logs"),
    Variable("CCL_MPI_LIBRARY_PATH", "ccl", "ccl <oneCCL>", "path", "Intel MPI's library"),
    Variable("CCL_OFI_LIBRARY_PATH", "ccl", "ccl <oneCCL>", "path", "libfabric"),
    Variable("CCL_PROCESS_LAUNCHER", "plan ccl", "<oneCCL>", "hydra, torchrun or none", "how oneCCL finds out its local ranks"),
    Variable("CCL_REDUCE", "<user>", "plan <oneCCL>", "algorithm", "oneCCL's algorithm for reduce"),
    Variable("CCL_REDUCE_SCATTER", "<user>", "plan <oneCCL>", "algorithm", "oneCCL's algorithm for reduce_scatter"),
    Variable("CCL_WORKER_AFFINITY", "<user> plan", "ccl cli <oneCCL>", "CPUs with commas", "workers' CPUs on a host"),
    Variable("CCL_WORKER_COUNT", "<user> plan", "config ccl <oneCCL>", "integer", "worker threads of a rank"),
    Variable("CCL_WORKER_OFFLOAD", "plan", "ccl <oneCCL>", "1 or 0", "whether workers or callers make progress"),
    Variable("CCL_YIELD", "plan", "ccl <oneCCL>", "sched_yield", "how a polling thread gives up its core between polls"),
    Variable("FI_EFA_FORK_SAFE", "plan", "<libfabric>", "1", "whether a process over efa may fork"),
    Variable("FI_PROVIDER", "<user> plan", "config agent ccl discovery <libfabric>", "name", "libfabric's provider"),
    Variable("FI_PROVIDER_PATH", "<user> ccl", "discovery <libfabric>", "path", "directory of the providers"),
    Variable("FI_TCP_PORT_HIGH_RANGE", "plan", "<libfabric>", "integer", "the last port on which the provider tcp may listen"),
    Variable("FI_TCP_PORT_LOW_RANGE", "plan", "<libfabric>", "integer", "the first port on which the provider tcp may listen"),
    Variable("FI_TCP_IFACE", "plan", "ccl <libfabric>", "interface", "interface of the provider tcp"),
    Variable("FI_VERBS_IFACE", "plan discovery", "<libfabric>", "interface", "interface of the provider verbs"),
    Variable("GLOO_SOCKET_IFNAME", "plan", "agent bench ccl <torch>", "interface", "interface of gloo"),
    Variable("TORCH_GLOO_LAZY_INIT", "plan", "<torch>", "1", "whether gloo connects when it first sends"),
    Variable("KINETO_LOG_LEVEL", "<user> runtime", "<torch>", "integer", "6 keeps torch's profiler quiet when it starts and stops"),
    Variable("TORCH_FR_BUFFER_SIZE", "<user> runtime", "<torch>", "integer", "collectives that the flight recorder keeps"),
    Variable("RDMAV_FORK_SAFE", "plan", "<libibverbs>", "1", "whether a process over verbs may fork"),
    Variable("I_MPI_OFI_LIBRARY", "ccl", "<Intel MPI>", "path", "libfabric, if Intel MPI carries oneCCL's data"),
    Variable("I_MPI_THREAD_SPLIT", "plan", "<Intel MPI>", "0 or 1", "whether threads call Intel MPI at the same time"),
    Variable("I_MPI_THREAD_YIELD", "plan", "<Intel MPI>", "0 to 3", "how a waiting thread gives up its core"),
    # ---- threads, memory, libraries
    Variable("OMP_NUM_THREADS", "<user> plan", "config agent <OpenMP>", "integer", "threads of a rank"),
    Variable("MKL_NUM_THREADS", "<user>", "agent <MKL>", "integer", "threads of a rank, in MKL"),
    Variable("OMP_PLACES", "<user> plan", "cli <OpenMP>", "places", "CPUs of each thread"),
    Variable("OMP_PROC_BIND", "<user>", "plan cli <OpenMP>", "policy", "CPU binding of threads"),
    Variable("KMP_AFFINITY", "<user> plan", "cli <OpenMP>", "affinity", "CPUs of each thread (Intel)"),
    Variable("KMP_BLOCKTIME", "plan", "<OpenMP>", "milliseconds", "how long a thread spins (Intel)"),
    Variable("GOMP_CPU_AFFINITY", "<user>", "plan cli <OpenMP>", "CPUs", "CPUs of each thread (GNU)"),
    Variable("LD_PRELOAD", "<user> plan", "agent cli <ld.so>", "paths with colons", "libraries to load first"),
    Variable("LD_LIBRARY_PATH", "<user>", "cli discovery <ld.so>", "paths with colons", "where libraries are"),
    Variable("GLIBC_TUNABLES", "<user> plan", "<glibc>", "NAME=VALUE with colons", "how glibc's malloc works"),
    Variable("MALLOC_CONF", "plan", "<jemalloc>", "options", "jemalloc's options"),
    # ---- libraries that train
    Variable("ACCELERATE_USE_CPU", "runtime", "<accelerate>", "true or false", "train on the CPU"),
    Variable("ACCELERATE_USE_DEEPSPEED", "<accelerate>", "runtime", "true or false", "train with DeepSpeed"),
    Variable("ACCELERATE_MIXED_PRECISION", "runtime", "<accelerate>", "bf16 or no", "default precision"),
    # ---- the user's session and environment
    Variable("CONDA_PREFIX", "<conda>", "discovery", "path", "the environment, searched for libraries"),
    Variable("CXX", "<user>", "ccl", "command", "C++ compiler"),
    Variable("HOME", "<user>", "config supervise", "path", "where ~/.config and ~/.local/state are"),
    Variable("I_MPI_ROOT", "<user>", "discovery", "path", "Intel MPI's directory"),
    Variable("LANG", "<user>", "cli", "locale", "whether the terminal shows Unicode"),
    Variable("LC_ALL", "<user>", "cli", "locale", "the same"),
    Variable("LC_CTYPE", "<user>", "cli", "locale", "the same"),
    Variable("NO_COLOR", "<user>", "cli", "any text", "no colours (no-color.org)"),
    Variable("PATH", "<user>", "agent discovery", "paths with colons", "where mpiexec and py-spy are"),
    Variable("PIP_EXTRA_INDEX_URL", "<user> ccl", "<pip>", "URLs", "further indexes"),
    Variable("PIP_FIND_LINKS", "<user> ccl", "<pip>", "paths or URLs", "further places with wheels"),
    Variable("PIP_INDEX_URL", "<user> ccl", "<pip>", "URL", "the index that oneCCL's wheel is fetched from"),
    Variable("PIP_NO_COLOR", "ccl", "<pip>", "1", "pip prints no colours"),
    Variable("PIP_PROGRESS_BAR", "ccl", "<pip>", "off", "whether pip draws a bar"),
    Variable("PIP_QUIET", "<user>", "ccl <pip>", "number", "makes pip print less; removed, since cpulaunch reads its messages"),
    Variable("PYTHONUNBUFFERED", "<user> ccl", "agent <Python>", "any text", "whether stdout is buffered by lines"),
    Variable("SSH_CONNECTION", "<sshd>", "discovery", "four words", "addresses of an ssh connection"),
    Variable("TERM", "<terminal>", "cli", "name", "type of the terminal"),
    Variable("UV_DEFAULT_INDEX", "<user>", "ccl", "URL", "uv's name for PIP_INDEX_URL"),
    Variable("UV_EXTRA_INDEX_URL", "<user>", "ccl", "URLs", "uv's name for PIP_EXTRA_INDEX_URL"),
    Variable("UV_FIND_LINKS", "<user>", "ccl", "paths or URLs", "uv's name for PIP_FIND_LINKS"),
    Variable("UV_INDEX", "<user>", "ccl", "URLs or NAME=URL", "uv's name for PIP_EXTRA_INDEX_URL"),
    Variable("UV_INDEX_URL", "<user>", "ccl", "URL", "uv's name for PIP_INDEX_URL"),
    Variable("ONEDNN_MAX_CPU_ISA", "<user>", "discovery <oneDNN>", "name", "the newest instructions that oneDNN may use"),
    Variable("ATEN_CPU_CAPABILITY", "<user>", "discovery <torch>", "name", "the newest instructions that torch's own kernels may use"),
    Variable("MKL_ENABLE_INSTRUCTIONS", "<user>", "discovery <MKL>", "name", "the newest instructions that MKL may use"),
    Variable("XDG_CACHE_HOME", "<user>", "user_file", "path", "directory for the built ccl and the measured rates of matrix products"),
    Variable("XDG_CONFIG_HOME", "<user>", "config", "path", "where the user's settings are"),
    Variable("XDG_RUNTIME_DIR", "<user>", "supervise", "path", "where the user's running jobs are listed"),
    Variable("XDG_STATE_HOME", "<user>", "supervise", "path", "the same, if XDG_RUNTIME_DIR is not set"),
    # ---- batch systems
    Variable("KUBERNETES_SERVICE_HOST", "<kubelet>", "discovery", "address", "whether this is a pod"),
    Variable("SLURM_JOB_CPUS_PER_NODE", "<Slurm>", "discovery", "2(x3),1", "CPUs of the allocation"),
    Variable("PBS_JOBID", "<PBS>", "cli discovery", "text", "the allocation"),
    Variable("PBS_NODEFILE", "<PBS>", "discovery", "path", "its hosts"),
    Variable("LSB_JOBID", "<LSF>", "discovery", "text", "the allocation"),
    Variable("LSB_DJOB_HOSTFILE", "<LSF>", "discovery", "path", "its hosts"),
    Variable("SLURM_JOB_ID", "<Slurm>", "cli discovery plan launchers", "integer", "the allocation"),
    Variable("SLURM_JOB_NODELIST", "<Slurm>", "discovery", "hosts, folded", "its hosts"),
    Variable("SLURM_NTASKS", "<Slurm>", "discovery launchers plan", "integer", "whether the user asked for tasks"),
    Variable("SLURM_NTASKS_PER_NODE", "<Slurm>", "discovery launchers plan", "integer", "the same"),
    Variable("SLURM_PROCID", "<Slurm>", "cli launchers plan", "integer", "which process of a step this is"),
    Variable("SLURM_PTY_PORT", "<Slurm>", "cli", "integer", "whether this process is in an interactive step"),
    Variable("SLURM_RESTART_COUNT", "<Slurm>", "discovery", "integer", "how often the job was requeued"),
    Variable("SLURM_STEP_ID", "<Slurm>", "cli discovery launchers", "integer", "whether this process is in a step"),
    Variable("SLURM_STEP_NUM_TASKS", "<Slurm>", "cli launchers plan", "integer", "the number of the step's processes"),
    Variable("SLURM_TASKS_PER_NODE", "<Slurm>", "discovery plan", "such as 2(x3),1", "tasks of each host"),
)
# fmt: on
