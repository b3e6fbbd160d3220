"""Messages of ssh and of each mpiexec about a failed start on a host."""

from __future__ import annotations

import pytest

from cpulaunch import launchers

SSH = [
    ("x\nssh: connect to host node2 port 22: Connection timed out\r\n", "node2", "Connection timed out"),
    (
        "ssh: Could not resolve hostname nodex: Name or service not known",
        "nodex",
        "Name or service not known",
    ),
]
HYDRA = (
    "[proxy:2@node2] HYDU_create_process (launch.c:73): execvp error on file /v/python (No such file)\n",
    "node2",
    "/v/python (No such file)",
)
OPENMPI = ("access an executable:\n\n   Executable: /v/python\n   Node: node2\n", "node2", "/v/python")


JOB = "srun: error: Unable to create step for job 13: "
SLURM = [
    (
        "slurmstepd-node2: error: execve(): /v/python: No such file or directory\n",
        "node2",
        "/v/python: No such file or directory",
    ),
    (
        "srun: error: Task launch for StepId=15.0 failed on node node2: Communication connection failure\n",
        "node2",
        "Communication connection failure",
    ),
    (
        JOB + "Requested node configuration is not available\n",
        "",
        JOB.partition(": error: ")[2] + "Requested node configuration is not available",
    ),
    (
        "srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive.\n",
        "",
        "SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive.",
    ),
]


SPAWNER = [
    (
        'cpulaunch: ssh: {"host": "node2", "why": "connect to host node2 port 22: No route to host"}\n',
        "node2",
        "No route to host",
    ),
    (
        'cpulaunch: ssh: x\ncpulaunch: ssh: []\ncpulaunch: ssh: {"host": "::1", "why": "there is no /v/python"}\n',
        "::1",
        "there is no /v/python",
    ),
]


@pytest.mark.parametrize(
    ("mpi", "text", "host", "why"),
    [
        *((mpi, *row) for mpi in launchers.MPIS for row in SSH),
        ("intel", *HYDRA),
        ("mpich", *HYDRA),
        ("openmpi", *OPENMPI),
        *(("slurm", *row) for row in SLURM),
        *(("ssh", *row) for row in SPAWNER),
    ],
)
def test_the_host_and_the_reason_are_found(mpi: str, text: str, host: str, why: str) -> None:
    assert launchers.load(mpi).start_failure(text) == (host, why)


def test_intels_message_counts_only_without_a_reason_from_ssh() -> None:
    text = "[mpiexec@login] Error: Unable to run bstrap_proxy on node2 (pid 26, exit code 32512)\n"
    intel = launchers.load("intel")
    assert intel.start_failure(text) is None
    assert intel.start_failure(text, ended=True) == ("node2", "Unable to run bstrap_proxy")
    assert intel.start_failure(text + SSH[0][0], ended=True) == ("node2", "Connection timed out")


@pytest.mark.parametrize("launcher", [*launchers.MPIS, "slurm"])
def test_other_output_does_not_count_as_a_failed_start(launcher: str) -> None:
    text = "ssh: warm\n[mpiexec@login] all is well\nsrun: error: node1: task 0: Exited with exit code 7\n"
    assert launchers.load(launcher).start_failure(text, ended=True) is None
