"""The hosts that batch systems allocate to a job."""

from __future__ import annotations

import pytest

from cpulaunch.discovery.batch.allocation import allocation, cpus_of_nodes
from cpulaunch.errors import ConfigError
from cpulaunch.model.hosts import Host


def shown(hosts: tuple[Host, ...]) -> str:
    return " ".join(f"{host.name}*{host.slots}" if host.slots else host.name for host in hosts)


SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-3]"}


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        ({"SLURM_JOB_NODELIST": "n1,gpu[02-03]"}, "n1 gpu02 gpu03"),
        # `salloc -N 3`: one task per node is only Slurm's default; the user didn't ask for it.
        ({**SLURM, "SLURM_TASKS_PER_NODE": "1(x3)"}, "n1 n2 n3"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2),2", "SLURM_NTASKS": "10"}, "n1*4 n2*4 n3*2"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_NTASKS_PER_NODE": "2"}, "n1*2 n2*2 n3*2"),
        ({"PBS_NODEFILE": "a\nb\n"}, "a b"),
        ({"PBS_NODEFILE": "a\na\nb\na\nb\n"}, "a*3 b*2"),
        ({"LSB_DJOB_HOSTFILE": "a\na\nb\nb\n"}, "a*2 b*2"),
    ],
)
def test_the_hosts_and_slots_of_an_allocation_are_read(environ: dict[str, str], hosts: str) -> None:
    found = allocation(environ, lambda path: path)
    assert found is not None
    assert shown(found.hosts) == hosts


POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.mark.parametrize(
    ("variable", "text", "hosts"),
    [
        (
            "I_MPI_HYDRA_HOST_FILE",
            "j-worker-0.j.ns.svc:2\nj-worker-1.j.ns.svc:2\n",
            "j-worker-0.j.ns.svc*2 j-worker-1.j.ns.svc*2",
        ),
        (
            "HYDRA_HOST_FILE",
            "a:1\nb:1\n",
            "a b",
        ),  # one slot is the operator's default; the user didn't ask for it
        ("OMPI_MCA_orte_default_hostfile", "a slots=4\nb slots=4\n", "a*4 b*4"),
        ("PRTE_MCA_prte_default_hostfile", "a slots=1\n", "a"),
    ],
)
def test_the_mpi_operators_hostfile_is_read_only_in_pods(variable: str, text: str, hosts: str) -> None:
    found = allocation({**POD, variable: "/etc/mpi/hostfile"}, {"/etc/mpi/hostfile": text}.get)
    assert found is not None
    assert (found.name, shown(found.hosts)) == ("/etc/mpi/hostfile", hosts)
    assert allocation({variable: "/etc/mpi/hostfile"}, {"/etc/mpi/hostfile": text}.get) is None


def test_the_number_of_tasks_of_the_current_step_is_not_the_jobs() -> None:
    """In ``srun --nodes=1 --ntasks=1 cpulaunch run``, only the list of nodes is the job's, not the step's."""
    step = {"SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "1", "SLURM_NTASKS": "1"}
    found = allocation({**SLURM, **step}, lambda path: None)
    assert found is not None
    assert shown(found.hosts) == "n1 n2 n3"


def test_the_launchers_pod_can_be_a_worker_and_has_its_short_name() -> None:
    hostfile = "j-launcher.j.ns.svc:2\nj-worker-0.j.ns.svc:2\n"
    files = {"/etc/mpi/hostfile": hostfile, "/etc/hostname": "j-launcher\n"}
    found = allocation({**POD, "HYDRA_HOST_FILE": "/etc/mpi/hostfile"}, files.get)
    assert found is not None
    assert shown(found.hosts) == "j-launcher*2 j-worker-0.j.ns.svc*2"


def test_the_number_of_cpus_of_each_node_is_read() -> None:
    assert cpus_of_nodes({**SLURM, "SLURM_JOB_CPUS_PER_NODE": "72(x2),36"}) == {"n1": 72, "n2": 72, "n3": 36}
    assert cpus_of_nodes(SLURM) == {}


def test_the_name_of_an_allocation_has_its_batch_system_and_job() -> None:
    assert allocation(POD, lambda path: path) is None
    slurm = allocation(SLURM, lambda path: path)
    pbs = allocation({"PBS_JOBID": "4.head", "PBS_NODEFILE": "a"}, lambda path: path)
    lsf = allocation({"LSB_JOBID": "5", "LSB_DJOB_HOSTFILE": "a"}, lambda path: path)
    assert slurm is not None
    assert pbs is not None
    assert lsf is not None
    assert (slurm.name, pbs.name, lsf.name) == ("Slurm job 17", "PBS job 4.head", "LSF job 5")


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2", "SLURM_NTASKS": "2"}, "2 is for 1 nodes, but n.1-3. are 3"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2(y3)", "SLURM_NTASKS": "2"}, "not like 2.x3."),
        (
            {"SLURM_JOB_NODELIST_HET_GROUP_1": "n[4-5]", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-3]"},
            "this Slurm job is heterogeneous, of 2 components: n.1-3., n.4-5.",
        ),
        ({**POD, "HYDRA_HOST_FILE": "a b"}, "a b:1: 'b' after the host 'a'"),
    ],
)
def test_a_broken_allocation_is_an_error(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        allocation(environ, lambda path: path)


def test_an_unreadable_nodefile_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"\$PBS_NODEFILE: /gone cannot be read"):
        allocation({"PBS_NODEFILE": "/gone"}, lambda path: None)
