"""Real jobs on four hosts, started by the real mpiexec of three MPIs, and by ssh without an MPI."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
from support.chaos import LAUNCHERS
from support.command import clean_environment, launcher_options, mpi_options, needs_two_cores
from support.faults import Cluster
from support.jobs import outputs
from support.marks import repeat

import cpulaunch as package
from cluster.conftest import HOSTS, Run
from cpulaunch.discovery.host.libraries import find_libraries, import_directories, library_directories

pytestmark = pytest.mark.slow

SHOW = """\
import json, os, socket, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "FORWARDED", "GIVEN", "SECRET", "LD_PRELOAD")
seen = {name: os.environ.get(name) for name in names}
seen.update(host=socket.gethostname(), cores=sorted(os.sched_getaffinity(0)), directory=os.getcwd(), python=sys.executable)
print(json.dumps(seen))
"""


@pytest.fixture(params=LAUNCHERS)
def mpi(request: pytest.FixtureRequest) -> list[str]:
    """The options that select a launcher: each MPI in turn, and ssh."""
    return launcher_options(request.param)


def usually(*launchers: str) -> pytest.MarkDecorator:
    """Test with these launchers by default, and with all launchers under ``scripts/test.sh --all``."""
    every = [name if name in launchers else repeat(name) for name in LAUNCHERS]
    return pytest.mark.parametrize("mpi", every, indirect=True)


@pytest.fixture
def show(tmp_path: Path) -> Path:
    (script := tmp_path / "show.py").write_text(SHOW)
    return script


@pytest.mark.parametrize(
    ("on", "mpi"),
    [
        *(("login", mpi) for mpi in ("intel", "openmpi", "ssh")),
        repeat("login", "mpich"),
        repeat("node0", "intel"),
        repeat("node0", "ssh"),
    ],
    indirect=["mpi"],
)
def test_ranks_run_where_the_plan_puts_them(
    on: str, mpi: list[str], cluster: Cluster, cpulaunch: Run, four: Path, show: Path
) -> None:
    options = ["-ppn", "2", "--env", "GIVEN=two words", "-x", "FORWARDED"]
    done = cpulaunch("run", *mpi, "-f", four, *options, show, on=on, FORWARDED="a $b", SECRET="ünsaid")
    ranks = outputs(done)
    assert {(r["GIVEN"], r["FORWARDED"], r["SECRET"]) for r in ranks} == {("two words", "a $b", "ünsaid")}
    assert [r["host"] for r in ranks] == [name for name in HOSTS for _ in range(2)]
    assert [r["LOCAL_RANK"] for r in ranks] == ["0", "1"] * 4
    assert [r["GROUP_RANK"] for r in ranks] == [str(n) for n in range(4) for _ in range(2)]
    assert [r["GLOO_SOCKET_IFNAME"] for r in ranks] == [cluster.interfaces[r["host"]] for r in ranks]
    assert {(r["MASTER_ADDR"], r["WORLD_SIZE"]) for r in ranks} == {(cluster.addresses["node0"], "8")}
    (plan,) = (json.loads(path.read_text()) for path in show.parent.glob("runs/*/plan.json"))
    assert not any(host["assumed"] for host in plan["hosts"])
    planned = [rank["cores"] for host in plan["hosts"] for rank in host["ranks"]]
    assert [",".join(map(str, r["cores"])) for r in ranks] == planned
    preloads = [host["env"].get("LD_PRELOAD") for host in plan["hosts"] for _ in range(2)]
    assert [r["LD_PRELOAD"] for r in ranks] == preloads


@usually("intel")
def test_a_hostfile_may_have_uneven_slots_names_and_addresses(
    mpi: list[str], cluster: Cluster, cpulaunch: Run, show: Path, tmp_path: Path
) -> None:
    (tmp_path / "uneven").write_text(
        f"# a hostfile for any MPI\nnode1 slots=2\n\nnode0:1\r\n{cluster.addresses['node2']} slots=2  # by address\nnode3\n"
    )
    # The MPI operator of Kubernetes sets I_MPI_PERHOST, which would override the counts of the hostfile.
    done = cpulaunch("run", *mpi, "-f", "uneven", show, I_MPI_PERHOST="1")
    ranks = outputs(done)
    assert [r["host"] for r in ranks] == ["node1", "node1", "node0", "node2", "node2", "node3"]
    assert [r["LOCAL_RANK"] for r in ranks] == ["0", "1", "0", "0", "1", "0"]
    assert {r["MASTER_ADDR"] for r in ranks} == {cluster.addresses["node1"]}


@usually("openmpi")
def test_a_plan_in_several_variables_reaches_all_hosts(
    mpi: list[str], cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    """Values of `env:` are a part of the plan.  Here, they make the plan too long for a single variable."""
    (script := tmp_path / "digest.py").write_text(
        "import hashlib, os\n"
        "noise = ''.join(os.environ[f'NOISE{number}'] for number in range(5))\n"
        "print(hashlib.sha256(noise.encode()).hexdigest())\n"
    )
    values = [random.Random(number).randbytes(40_000).hex() for number in range(5)]
    noise = [f"--env=NOISE{number}={value}" for number, value in enumerate(values)]
    done = cpulaunch("run", *mpi, "-f", four, "-ppn", "1", "--tee", "all", *noise, script)
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256("".join(values).encode()).hexdigest()
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {digest}" for rank in range(4)]


@pytest.mark.parametrize("flavour", ["intel", repeat("mpich")])
def test_an_environment_whose_path_has_a_space_starts_ranks_on_other_hosts(
    flavour: str, cluster: Cluster, four: Path, tmp_path: Path
) -> None:
    """For example, conda may be in "/home/me/my env".  Then the paths of mpiexec, its helpers, Python and
    cpulaunch have a space."""
    mpi = mpi_options(flavour)
    programs = Path(mpi[-1] if "--mpi-path" in mpi else sys.executable).parent
    if "--mpi-path" in mpi:
        programs /= "bin"
    (env := tmp_path / "my env").mkdir()
    (env / "bin").mkdir()
    for program in (*programs.glob("hydra_*"), *programs.glob("mpi*")):
        shutil.copy2(program, env / "bin")
    for directory in ("lib", "etc", "opt"):
        if (programs.parent / directory).is_dir():
            (env / directory).symlink_to(programs.parent / directory)
    (env / "bin" / "python").symlink_to(sys.executable)
    (env / "source").mkdir()
    (env / "source" / "cpulaunch").symlink_to(Path(package.__file__).parent)
    options = [
        "--mpi",
        flavour,
        "--mpi-path",
        env / "bin",
        "-f",
        four,
        "-ppn",
        1,
        "--tee",
        "all",
        "--no-python",
    ]
    argv = [env / "bin" / "python", "-m", "cpulaunch", "run", *options, "printenv", "RANK"]
    environ = clean_environment(PYTHONPATH=str(env / "source"))
    done = cluster.run("login", list(map(str, argv)), timeout=60.0, directory=tmp_path, env=environ)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank}" for rank in range(4)], done.stderr
    (plan,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/plan.json"))
    assert plan["mpiexec"].startswith(f"{env}/bin/mpiexec")


@needs_two_cores
@usually("intel")
def test_the_ranks_of_each_host_are_bound_to_its_own_cores(
    mpi: list[str], cluster: Cluster, cpulaunch: Run, four: Path, show: Path
) -> None:
    one = max(os.sched_getaffinity(0))
    with cluster.limited("node2", str(one)):
        done = cpulaunch("run", *mpi, "-f", four, "-ppn", "1", show, on="login")
    ranks = outputs(done)
    assert (ranks[2]["cores"], ranks[2]["OMP_NUM_THREADS"]) == ([one], "1")
    assert all(len(r["cores"]) > 1 and r["OMP_NUM_THREADS"] != "1" for r in ranks if r is not ranks[2])
    assert "warning: node2: has 1 core, but most hosts have" in done.stderr


@pytest.mark.parametrize(
    ("mpi", "name", "value"),
    [
        repeat("intel", "I_MPI_PIN_DOMAIN", "core"),
        repeat("mpich", "HYDRA_BINDING", "core"),
        ("openmpi", "PRTE_MCA_plm", "slurm"),
        repeat("openmpi", "PRTE_MCA_hwloc_default_binding_policy", "core"),
    ],
    indirect=["mpi"],
)
def test_variables_that_pin_ranks_or_select_a_launcher_do_not_reach_mpiexec(
    mpi: list[str], name: str, value: str, cluster: Cluster, cpulaunch: Run, four: Path, show: Path
) -> None:
    done = cpulaunch("run", *mpi, "-f", four, "-ppn", "2", "-v", show, on="login", **{name: value})
    assert [r["host"] for r in outputs(done)] == [host for host in HOSTS for _ in range(2)]
    assert f"doesn't get {name}: cpulaunch places and starts the ranks" in done.stderr


@usually("ssh")
def test_ranks_have_the_planned_directory_and_python_despite_startup_files(
    mpi: list[str], cluster: Cluster, cpulaunch: Run, four: Path, show: Path
) -> None:
    bashrc = Path.home() / ".bashrc"
    if not bashrc.exists():
        pytest.skip("no ~/.bashrc to replace")
    with cluster.replaced("node2", bashrc, "cd /; export PATH=/usr/bin:/bin; echo hello\n"):
        done = cpulaunch("run", *mpi, "-f", four, "-ppn", "1", "-v", show)
    done.stdout = done.stdout.replace("hello\n", "")
    ranks = outputs(done)
    assert {r["directory"] for r in ranks} == {str(show.parent)}
    assert len({r["python"] for r in ranks}) == 1


@usually("mpich")
def test_without_preflight_agents_find_interfaces_and_libraries(
    mpi: list[str], cluster: Cluster, cpulaunch: Run, four: Path, show: Path
) -> None:
    done = cpulaunch("run", *mpi, "-f", four, "-ppn", "1", "--skip-preflight", show, on="login")
    ranks = outputs(done)
    assert [r["host"] for r in ranks] == list(HOSTS)
    assert [r["GLOO_SOCKET_IFNAME"] for r in ranks] == [cluster.interfaces[name] for name in HOSTS]
    here = find_libraries(library_directories(), import_directories())
    assert {r["LD_PRELOAD"] for r in ranks} == {here.get("tcmalloc")}


@pytest.mark.parametrize(
    ("fault", "mpi"),
    [
        ("unknown_key", "ssh"),
        ("dropping", "openmpi"),
        *(repeat("unknown_key", mpi) for mpi in ("intel", "mpich", "openmpi")),
        *(repeat("without_sshd", mpi) for mpi in ("intel", "mpich", "openmpi")),
        *(repeat("dropping", mpi) for mpi in ("intel", "mpich")),
    ],
    indirect=["mpi"],
)
def test_without_preflight_a_faulty_host_fails_the_job_soon_with_a_reason(
    fault: str, mpi: list[str], cluster: Cluster, cpulaunch: Run, four: Path, show: Path
) -> None:
    words = {
        "unknown_key": "Host key verification failed",
        "without_sshd": "Connection refused",
        "dropping": "Connection timed out",
    }
    with getattr(cluster, fault)("node2"):
        done = cpulaunch(
            "run", *mpi, "-f", four, "-ppn", "1", "--skip-preflight", show, on="login", timeout=30
        )
    assert done.returncode == 3, done.stderr
    assert words[fault] in done.stderr


def test_the_hosts_of_a_stray_slurm_allocation_are_used(cluster: Cluster, cpulaunch: Run, show: Path) -> None:
    allocation = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[0-2]",
        "SLURM_NTASKS": "4",
        "SLURM_TASKS_PER_NODE": "2,1(x2)",
    }
    done = cpulaunch("run", *mpi_options("intel"), show, **allocation)
    assert done.returncode == 0, done.stderr
    assert "Slurm job 4711 gives 3 hosts: node0 ..." in done.stderr
    assert [r["host"] for r in outputs(done)] == ["node0", "node0", "node1", "node2"]
