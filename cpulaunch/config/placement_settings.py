"""The sections of settings that say where ranks run: hosts, instances, the MPI, and cores."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from cpulaunch import plugins, variables
from cpulaunch.config.kinds import Choice, Nodes, Number, Numbers, Ports, Switch, Text, Words
from cpulaunch.config.setting import Ask, Section, Setting
from cpulaunch.config.values import HostCount, PortRange
from cpulaunch.model.cores import CoreSet

Auto: TypeAlias = Literal["auto"]
Allocator: TypeAlias = Literal["auto", "tcmalloc", "jemalloc", "glibc", "default"]
OpenMP: TypeAlias = Literal["auto", "intel", "default"]
Strategy: TypeAlias = Literal["scatter", "close", "none"]


class HostsSection(Section):
    section = "hosts"
    title = "Hosts and number of ranks"

    hostfile = Setting(
        Text("FILE"),
        "",
        "file with one host per line: host, host:N or host slots=N, where N is the number of ranks",
        ("--hostfile", "-f"),
        ask=Ask(
            1,
            "Where should the ranks run?",
            "A hostfile lists several machines; ssh or an MPI starts ranks on them.",
        ),
        common=True,
    )
    list = Setting(Text("a,b:2"), "", "list of hosts, instead of a hostfile", ("--hosts",), common=True)
    exclude = Setting(Text("LIST"), "", "hosts to leave out", ("--exclude",))
    nnodes: Setting[HostCount | Literal["all"]] = Setting(
        Nodes("all"),
        "all",
        "number of hosts to use, from the start of the list; MIN:MAX: use up to MAX; restarts "
        "continue on at least MIN",
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
            "auto: the hostfile's slots, else one per NUMA node: memory stays local.",
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
        "TCP ports that the job may listen on, for hosts with a firewall; auto: any free port",
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
    skip_preflight = Setting(Switch(), False, "start without checking the hosts first", ("--skip-preflight",))

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
        "number of independent programs on all hosts together; auto (--throughput-mode): one per NUMA node, "
        "or as many as fit if instances.cores_per_instance is set",
        ("--instances",),
        ask=Ask(
            4,
            "How many independent instances, as for inference?",
            "none: one job of ranks, such as a training.  auto: one per NUMA node.",
        ),
        common=True,
    )
    cores_per_instance: Setting[int | Literal["auto", "max"]] = Setting(
        Number(1, "auto", "max"),
        "auto",
        "physical cores per instance; auto: an even share; max: also the remaining cores; --latency-mode: 4",
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
        "run only this instance, counted from 0, on the cores that it would have if all instances ran",
        ("--instance",),
    )
    fail_fast = Setting(Switch(), False, "end all instances when one of them fails", ("--fail-fast",))


class MpiSection(Section):
    section = "mpi"
    title = "The MPI that starts the ranks"

    flavour = Setting(
        Choice("auto", *plugins.MPIS),
        "auto",
        "MPI that starts the ranks; auto: Intel MPI in this Python environment, else the first on PATH",
        ("--mpi",),
        ask=Ask(
            2,
            "Which MPI starts the ranks?",
            "It starts them; cpulaunch pins and watches them.  auto: the first found.",
        ),
        common=True,
    )
    path = Setting(Text("DIR|FILE"), "auto", "path of mpiexec or of its directory", ("--mpi-path",))
    args: Setting[tuple[str, ...]] = Setting(
        Words("ARG"), (), "further arguments for mpiexec or srun", ("--mpi-args",)
    )


class CpuSection(Section):
    section = "cpu"
    title = "Cores, memory, threads"

    cores_per_rank: Setting[int | Literal["auto", "max"]] = Setting(
        Number(1, "auto", "max"),
        "auto",
        "physical cores per rank, including cores for communication; auto: an even share; max: also the "
        "remaining cores",
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
        "scatter: spread ranks over NUMA nodes; close: fill one node after the other; none: do not pin ranks",
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
        "only warn if a rank lacks its planned cores, threads, memory policy or libraries",
        ("--lenient",),
    )
    allocator: Setting[Allocator] = Setting(
        Choice(*get_args(Allocator)),
        "auto",
        "memory allocator; glibc: glibc's malloc, tuned to keep freed memory; default: libc's malloc, "
        "untuned; auto: tcmalloc if it is installed, else glibc",
        ("--allocator",),
    )
    openmp: Setting[OpenMP] = Setting(
        Choice(*get_args(OpenMP)),
        "auto",
        "OpenMP runtime; intel: preload Intel's (package intel-openmp); default, auto: torch's own",
        ("--openmp",),
    )
