"""Hydra, the mpiexec of MPICH and Intel MPI."""

from __future__ import annotations

import signal
from functools import partial

from cpulaunch.launchers.mpi import HOSTFILE, Mpiexec
from cpulaunch.plan.placement import IdentityVariables

_Hydra = partial(
    Mpiexec,
    identity=IdentityVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    hostfile=("-f", HOSTFILE),
    host_line="{host}:{slots}",
    ranks_per_host=("-ppn", "{slots}"),
    directory=("-wdir", "{path}"),
    set_variable=("-genv", "{name}", "{value}"),
    when_orphaned=signal.SIGTERM,
    # After this message, MPICH's mpiexec still waits for the ranks.
    failures=(r"\[proxy:[\d:]+@(?P<host>[^\]]+)\].*execvp error on file (?P<why>[^\r\n]+)",),
)

INTEL = _Hydra(
    name="intel",
    title="Intel MPI",
    version_words=("Intel(R) MPI",),
    executables=("mpiexec.hydra", "mpiexec", "mpirun"),
    called_by_script="mpiexec.hydra",
    wheel="impi_rt",
    install_hint="pip install 'cpulaunch[mpi]' brings Intel MPI",
    hostfile_variables=("I_MPI_HYDRA_HOST_FILE",),
    count_variables=("I_MPI_PERHOST",),
    left_out=("I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "I_MPI_PIN_ORDER"),
    ssh="I_MPI_HYDRA_BOOTSTRAP_EXEC",
    interface=("I_MPI_HYDRA_IFACE", "{name}"),
    env={"I_MPI_PIN": "off", "I_MPI_HYDRA_BOOTSTRAP": "ssh", "I_MPI_HYDRA_RMK": "user"},
    # Hydra starts in 8 ms instead of 40 if it doesn't inspect the machine with hwloc.  It needn't, because
    # cpulaunch binds the ranks.  On a machine without NUMA nodes, ipl prints the warning in ``noise``.
    watched_env={"I_MPI_HYDRA_TOPOLIB": "ipl"},
    noise=("IPL WARN> ",),
    ports={"I_MPI_PORT_RANGE": "{first}:{last}"},
    over_ipv6=("-v6",),
    is_intel_mpi=True,
    stdin=("-s", "{rank}"),
    last_failures=(r"(?P<why>Unable to run bstrap_proxy) on (?P<host>\S+)",),  # ssh may add the reason later
)

MPICH = _Hydra(
    name="mpich",
    title="MPICH",
    version_words=("HYDRA",),
    executables=("mpiexec", "mpiexec.hydra", "mpirun"),
    install_hint="pip install mpich in an environment of its own, or your distribution's package",
    hostfile_variables=("HYDRA_HOST_FILE",),
    left_out=("HYDRA_BINDING", "HYDRA_MAPPING", "HYDRA_MEMBIND", "HYDRA_BOOTSTRAP", "HYDRA_BOOTSTRAP_EXEC"),
    ssh="HYDRA_LAUNCHER_EXEC",
    interface=("HYDRA_IFACE", "{name}"),
    env={"HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user"},
    over_ipv6=None,
    # The second variable is for programs that use MPI over UCX.
    ports={"MPIR_CVAR_CH3_PORT_RANGE": "{first}:{last}", "UCX_TCP_PORT_RANGE": "{first}-{last}"},
)
