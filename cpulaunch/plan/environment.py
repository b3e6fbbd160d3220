"""Environment variables of ranks.  A variable that the user has set keeps its value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cpulaunch.errors import PlanError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.libraries import FILES, TORCHS_OWN, can_be_preloaded
from cpulaunch.model.topology import Topology
from cpulaunch.plan.malloc import GLIBC, TUNABLES, tunables
from cpulaunch.plan.placement import RankPlan

AFFINITY = "CCL_WORKER_AFFINITY"
THREADS = "OMP_NUM_THREADS"
PRELOAD = "LD_PRELOAD"

BINDS_THREADS = ("OMP_PLACES", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
"""Variables that bind OpenMP's threads."""

LEFT_OUT = "is left out, as LD_PRELOAD takes no space or colon"
"""Note about a library whose path LD_PRELOAD can't contain."""

LIBRARY_VARIABLES = (PRELOAD, "MALLOC_CONF", "KMP_BLOCKTIME", TUNABLES)
"""Variables that `choose_libraries` may set."""

HOW_TO_GET = {
    "tcmalloc": "apt install libtcmalloc-minimal4, dnf install gperftools-libs, or conda install gperftools",
    "jemalloc": "apt install libjemalloc2, dnf install jemalloc, or conda install jemalloc",
    "intel": "pip install intel-openmp, or conda install intel-openmp",
}

# The library that `auto` uses if it is installed; docs/placement.md has measurements.
_AUTO = {"allocator": "tcmalloc", "openmp": None}

_TUNING = {
    # Tuned for training as in Intel's launchers: freed memory is kept for the next step.
    "jemalloc": {
        "MALLOC_CONF": "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
        "dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
    },
}

# Prefix of a preloaded file → the library.
_FILE_PREFIXES = {
    "allocator": {
        "libtcmalloc": "tcmalloc",
        "libjemalloc": "jemalloc",
        "libmimalloc": "mimalloc",
        "libtbbmalloc": "tbbmalloc",
    },
    # libomp is LLVM's, from the same code as Intel's.
    "openmp": {"libiomp": "intel", "libomp": "intel", "libgomp": "gomp"},
}

# Variables of a host, a login or a job step, which are wrong on another host.
_NOT_FORWARDED_PREFIXES = (
    "BASH_FUNC_", "SSH_", "XDG_", "DBUS_", "SLURM_", "PBS_", "PMI", "PALS_", "PRTE_", "OMPI_COMM_",
)  # fmt: skip
_NOT_FORWARDED = {"_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME", "DISPLAY", "TERM_SESSION_ID", "TMUX", "STY"}


class Libraries(NamedTuple):
    """The allocator and the OpenMP runtime of a host's ranks.

    Their names are values of the settings; ``default`` is libc's allocator, or torch's OpenMP.  A library in
    the user's LD_PRELOAD goes by the name that _FILE_PREFIXES gives it.
    """

    allocator: str
    why_allocator: str  # the reason for the choice
    openmp: str
    intel_openmp: bool  # the runtime reads KMP_* variables
    env: Mapping[str, str]  # variables that select the libraries
    notes: Sequence[str]


def choose_libraries(
    found: Mapping[str, str] | None, allocator: str, openmp: str, users: Mapping[str, str], untuned: str
) -> Libraries:
    """Choose the libraries for a host's ranks among those ``found`` on the host.

    ``allocator`` and ``openmp`` are values of the settings.  ``found`` is the result of `find_libraries`, or
    None if the host is unknown.  ``users`` has the user's variables.  ``untuned`` is the result of
    `why_untuned`; unless it is empty, ``auto`` doesn't tune glibc's malloc.  Raises PlanError if a requested
    library was not found, or if the user preloads a different one.
    """
    preloaded = users.get(PRELOAD, "").replace(":", " ").split()
    chosen, paths, env, notes = {}, [], {}, []
    for what, asked in (("allocator", allocator), ("openmp", openmp)):
        if users_own := library_among(what, preloaded):
            if asked not in ("auto", "default", users_own):
                raise PlanError(
                    f"{what} {asked} is requested, but LD_PRELOAD has {users_own} ({users[PRELOAD]})",
                    hint="leave out one of the two",
                )
            chosen[what] = users_own
            notes.append(f"{what}: {users_own}, from your LD_PRELOAD")
        elif library := _library(found, what, asked):
            path = found[library] if found is not None else FILES[library][0]
            if not can_be_preloaded(path):
                notes.append(f"{what}: {library} {LEFT_OUT}: {path}")
                continue
            chosen[what] = library
            paths.append(path)
            env.update(_TUNING.get(library, {}))
    own_runtime = (found or {}).get(TORCHS_OWN, "")
    runtime = chosen.get("openmp") or library_among("openmp", [own_runtime])
    if runtime == "intel":
        env["KMP_BLOCKTIME"] = "1"
    env = {name: value for name, value in env.items() if name not in users}
    name, why = _allocator(found, allocator, chosen.get("allocator"), preloaded, untuned)
    if name == GLIBC:
        env[TUNABLES] = tunables(users)
        if own := users.get(TUNABLES):
            notes.append(f"{TUNABLES}: your {own} stays")
    if paths:
        env[PRELOAD] = ":".join([*preloaded, *paths])
        if preloaded:
            notes.append(f"LD_PRELOAD: your {users[PRELOAD]} comes first")
    if found is None and paths:
        notes.append(f"not checked on this host: {', '.join(paths)}")
    return Libraries(name, why, chosen.get("openmp", "default"), runtime == "intel", env, notes)


def library_among(what: str, paths: Iterable[str]) -> str | None:
    """Return the allocator or OpenMP runtime (``what``) among the libraries ``paths``, or None."""
    names = [path.rpartition("/")[2] for path in paths]
    kinds = (kind for name in names for begin, kind in _FILE_PREFIXES[what].items() if name.startswith(begin))
    return next(kinds, None)


def _allocator(
    found: Mapping[str, str] | None, asked: str, library: str | None, preloaded: Sequence[str], untuned: str
) -> tuple[str, str]:
    """Return the allocator and the reason for it.  ``library`` is the preloaded allocator."""
    if library:
        if library_among("allocator", preloaded):
            return library, "in your LD_PRELOAD"
        return library, "it is installed" if asked == "auto" else "asked for"
    if asked in (GLIBC, "default"):
        return asked, "asked for"
    if asked != "auto":
        return "default", f"{asked} {LEFT_OUT}"
    if found is None:
        return "default" if untuned else GLIBC, "what is installed is unknown"
    best = _AUTO["allocator"]
    absent = f"{best} {LEFT_OUT}" if best in found else f"{best} is not installed"
    return ("default", f"{absent}, and {untuned}") if untuned else (GLIBC, absent)


def _library(found: Mapping[str, str] | None, what: str, asked: str) -> str | None:
    """Return the name in FILES of the library to preload; None to preload nothing."""
    if asked in ("default", GLIBC) or (
        what == "openmp" and library_among(what, [(found or {}).get(TORCHS_OWN, "")]) == asked
    ):
        return None
    if asked == "auto":
        best = _AUTO[what]
        return best if best in (found or {}) else None
    if found is not None and asked not in found:
        name = "Intel's OpenMP runtime" if asked == "intel" else asked
        raise PlanError(f"{what} {asked}: {name} was not found", hint=HOW_TO_GET[asked])
    return asked


def places_environment(rank: RankPlan, intel_openmp: bool) -> dict[str, str]:
    """Return the variable that binds each OpenMP thread of a rank, except the first, to a core of its own.

    The first is the program's main thread, which may use all cores of the rank.  Processes and threads that
    it starts (for DataLoader, Python, gloo or OpenBLAS) inherit its mask.  With ``OMP_PLACES=cores``, they
    would all share one core.

    ``intel_openmp``: the runtime reads ``KMP_AFFINITY``.  Empty if the numbers of threads and cores differ.
    """
    if len(rank.places) != rank.threads or rank.threads == 1:
        return {}
    rest = rank.places[1:]
    if intel_openmp:
        everything = "{" + ",".join(map(str, rank.cores)) + "}"
        others = ",".join("{" + ",".join(map(str, place)) + "}" for place in rest)
        return {"KMP_AFFINITY": f"granularity=fine,proclist=[{everything},{others}],explicit"}
    return {"OMP_PLACES": ",".join([_place(rank.cores), *_series(rest)])}


def memory_policy(rank: RankPlan, topology: Topology, strict: bool) -> str:
    """Return a rank's memory policy in the kernel's notation (numa(7)): ``prefer:1``, ``bind:1``, or ``""``.

    Empty on a host with one NUMA node, and for a rank that spans several: the kernel then gives each thread
    memory of the node on which it runs.  ``strict``: a rank must not get memory of other nodes.
    """
    if len(topology.nodes | topology.memory_only_nodes) < 2:
        return ""
    if strict:
        return f"bind:{rank.numa_nodes}"
    return f"prefer:{rank.numa_nodes}" if len(rank.numa_nodes) == 1 else ""


def common(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries that all of ``environments`` share."""
    each = iter(environments)
    shared = dict(next(each))
    for environment in each:
        if environment != shared:
            shared = {k: v for k, v in shared.items() if environment.get(k) == v}
    return shared


def to_forward(environ: Mapping[str, str]) -> list[str]:
    """Return the names in ``environ`` that make sense on other hosts, sorted."""
    return sorted(
        name
        for name in environ
        if name not in _NOT_FORWARDED and not name.startswith(_NOT_FORWARDED_PREFIXES) and name.isidentifier()
    )


def _place(cpus: CoreSet) -> str:
    """Return ``{1:13,57:13}`` for CPUs 1-13 and 57-69."""
    runs = (str(first) if length == 1 else f"{first}:{length}" for first, length in cpus.ranges())
    return "{" + ",".join(runs) + "}"


def _series(places: Sequence[CoreSet]) -> Iterator[str]:
    """Fold places in the syntax of OMP_PLACES: ``{2,58}:3`` means ``{2,58},{3,59},{4,60}``."""
    numbers = [tuple(place) for place in places]
    while numbers:
        first, length = numbers[0], 1
        step = numbers[1][0] - first[0] if len(numbers) > 1 else 0
        while step > 0 and numbers[length : length + 1] == [tuple(cpu + step * length for cpu in first)]:
            length += 1
        text = "{" + ",".join(map(str, first)) + "}"
        yield text if length == 1 else f"{text}:{length}" if step == 1 else f"{text}:{length}:{step}"
        numbers = numbers[length:]


# Variables by which batch systems and launchers tell a process its rank, one tuple for each.  A library in a
# rank must not read those of an enclosing allocation or of another launcher.
_FAMILIES = (
    # Slurm
    (
        "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GTIDS",
        "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
    ),
    # Hydra (Intel MPI, MPICH), and Slurm's own PMI
    (
        "PMI_RANK", "PMI_SIZE", "PMI_ID", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),
    # Open MPI (PRRTE)
    (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_NODE_RANK", "PMIX_RANK",
    ),
    # MVAPICH
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    # PALS and ALPS (Cray)
    ("PALS_RANKID", "PALS_NODEID", "PALS_LOCAL_RANKID", "ALPS_APP_PE"),
    # jsrun (Spectrum LSF)
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    # Flux
    ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
)  # fmt: skip


def foreign_claims(own: Collection[str], kept: Collection[str]) -> tuple[str, ...]:
    """Return the rank variables of all launchers except the one that uses the variables ``own``.

    Variables in ``kept``, which the user forwards, are not returned.
    """
    families = (family for family in _FAMILIES if not set(family) & set(own))
    return tuple(name for family in families for name in family if name not in kept)
