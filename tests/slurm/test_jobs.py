"""Real jobs on four nodes of a real Slurm, started by its srun."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support.command import bounded, clean_environment, needs_two_cores
from support.jobs import outputs
from support.marks import repeat
from support.slurm import CPUS, CPUSETS, Queue

from cpulaunch.model.cores import CoreSet
from slurm.conftest import CPULAUNCH, HOSTS, Run

pytestmark = pytest.mark.slow

STEP = ("run", "--launcher", "slurm", "--tee", "all", "--oversubscribe")

SHOW = """\
import json, os, socket, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
         "GLOO_SOCKET_IFNAME", "GIVEN", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
seen = {name: os.environ.get(name) for name in names}
seen.update(host=socket.gethostname(), cores=sorted(os.sched_getaffinity(0)), directory=os.getcwd())
print(json.dumps(seen))
"""


@pytest.fixture
def show(tmp_path: Path) -> Path:
    (script := tmp_path / "show.py").write_text(SHOW)
    return script


def test_ranks_run_as_planned_in_any_order_and_number(queue: Queue, salloc: Run, show: Path) -> None:
    """The allocation sets variables that srun would read as options."""
    hosts = ("--hosts", "node2:2,node0:1,node3:3")
    env = {"SLURM_EXACT": "1", "SLURM_LABELIO": "1", "SLURM_NTASKS_PER_NODE": "1", "SRUN_CPUS_PER_TASK": "1"}
    env |= {"SLURM_MEM_PER_CPU": "100", "SLURM_MEM_PER_NODE": "100", "SLURM_STDOUTMODE": "none"}
    done = salloc(f"-N4 -c {CPUS}", *STEP, *hosts, "--env", "GIVEN=two words", show, **env)
    ranks = outputs(done)
    assert [r["host"] for r in ranks] == ["node2", "node2", "node0", "node3", "node3", "node3"]
    assert [r["LOCAL_RANK"] for r in ranks] == ["0", "1", "0", "0", "1", "2"]
    assert [r["LOCAL_WORLD_SIZE"] for r in ranks] == ["2", "2", "1", "3", "3", "3"]
    assert [r["GLOO_SOCKET_IFNAME"] for r in ranks] == [queue.interfaces[r["host"]] for r in ranks]
    assert {(r["MASTER_ADDR"], r["WORLD_SIZE"]) for r in ranks} == {(queue.addresses["node2"], "6")}
    assert {(r["GIVEN"], r["directory"]) for r in ranks} == {("two words", str(show.parent))}
    # The step's own variables, which scripts written for srun use.
    told = [(r["SLURM_PROCID"], r["SLURM_NTASKS"], r["SLURM_LOCALID"]) for r in ranks]
    assert told == [(r["RANK"], r["WORLD_SIZE"], r["LOCAL_RANK"]) for r in ranks]
    (plan,) = (json.loads(path.read_text()) for path in show.parent.glob("runs/*/plan.json"))
    assert not any(host["assumed"] for host in plan["hosts"])
    planned = [rank["cores"] for host in plan["hosts"] for rank in host["ranks"]]
    assert [str(CoreSet(r["cores"])) for r in ranks] == planned


def test_the_tasks_of_a_batch_script_become_the_ranks(queue: Queue, show: Path, tmp_path: Path) -> None:
    """According to its variables, the batch shell is rank 0 of 7, or of 1."""
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n"
        "#SBATCH --nodes=4 --ntasks=7 --overcommit --output=slurm.out --error=slurm.err\n"
        f"exec {' '.join(CPULAUNCH)} {' '.join(STEP)} show.py\n"
    )
    environ = clean_environment(LC_ALL="C.UTF-8", **queue.environment)
    done = queue.run("login", ["sbatch", "--wait", "job.sh"], directory=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr + (tmp_path / "slurm.err").read_text()
    done.stdout = (tmp_path / "slurm.out").read_text()
    hosts = [rank["host"] for rank in outputs(done)]
    assert hosts == [*(host for host in HOSTS[:3] for _ in range(2)), "node3"]


@needs_two_cores
@pytest.mark.skipif(not (CPUSETS / "cpuset.cpus").exists(), reason="needs control groups of version 1")
def test_two_jobs_on_the_same_nodes_have_the_cpus_of_their_cgroups(show: Path, tmp_path: Path) -> None:
    options = ("--partition=spare", "--nodes=2", "--cpus-per-task=1")
    nodes = (f"a{os.getpid()}", f"b{os.getpid()}")
    with Queue(("login", *nodes), cgroups=True) as queue:
        with queue.allocation(*options) as first, queue.allocation(*options) as second:
            jobs = [
                queue.run(
                    "login",
                    [*CPULAUNCH, *STEP, show],
                    directory=tmp_path,
                    env=clean_environment(**allocation),
                )
                for allocation in (first, second)
            ]
        cores = [[rank["cores"] for rank in outputs(job)] for job in jobs]
    assert sorted(map(str, cores)) == ["[[0], [0]]", "[[1], [1]]"]


def test_two_jobs_share_an_allocation(queue: Queue, show: Path, tmp_path: Path) -> None:
    """Both jobs run at the same time, as each waits for a file that the other writes."""
    (tmp_path / "meet.py").write_text(
        "import os, pathlib, sys, time\n"
        "own, other = sys.argv[1:]\n"
        "pathlib.Path(own + os.environ['RANK']).touch()\n"
        "while not all(pathlib.Path(other + rank).exists() for rank in '01'): time.sleep(0.01)\n"
        "print('met')\n"
    )
    environ = clean_environment(LC_ALL="C.UTF-8")
    with queue.allocation("--nodes=4") as allocation:
        jobs = [
            queue.start(
                "login",
                [*CPULAUNCH, *STEP, "--hosts", hosts, "meet.py", *names],
                directory=tmp_path,
                env=environ | allocation,
            )
            for hosts, names in (("node0,node1", ("a", "b")), ("node1,node2", ("b", "a")))
        ]
        done = [job.communicate(timeout=60) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], done
    assert [sorted(out.splitlines()) for out, _ in done] == [["[0] met", "[1] met"]] * 2


@needs_two_cores
def test_a_dry_run_knows_the_jobs_cpus_on_each_node(salloc: Run, show: Path) -> None:
    tasks, options = "-n 3 -N 2 -c 1", ("run", "--tee", "all")
    planned = json.loads(salloc(tasks, *options, "--dry-run", "--format", "json", show).stdout)
    done = salloc(tasks, *options, show)
    cores = [len(CoreSet.parse(rank["cores"])) for host in planned["hosts"] for rank in host["ranks"]]
    assert cores == [len(rank["cores"]) for rank in outputs(done)] == [1, 1, 1], done.stderr
    assert planned["launcher"] == "slurm"


class TestAuto:
    @needs_two_cores
    def test_uses_srun_and_ssh_warns_if_the_job_has_parts_of_nodes(self, salloc: Run, show: Path) -> None:
        done = salloc("-N2", "run", "--tee", "all", show)
        assert [len(r["cores"]) for r in outputs(done)] == [1, 1]
        part = f"Slurm has given this job 1 of the {CPUS} CPUs of node0"
        assert "started by srun (in an allocation of Slurm)" in done.stderr
        by_ssh = salloc("-N2", "run", "--launcher", "mpirun", "--tee", "all", show)
        assert f"warning: {part}, and ranks that ssh starts can use all of them" in by_ssh.stderr


def test_a_heterogeneous_job_runs_on_the_named_component(salloc: Run, show: Path) -> None:
    apart = "-N1 : -N2"
    done = salloc(apart, *STEP, "-ppn", 1, show)
    assert done.returncode == 2
    assert "this Slurm job is heterogeneous, of 2 components: node0, node[1-2]" in done.stderr
    assert "hint: select nodes with --hosts" in done.stderr
    by_srun = salloc(apart, *STEP, "--hosts", "node0:2", show)
    assert [r["host"] for r in outputs(by_srun)] == ["node0", "node0"]
    by_ssh = salloc(apart, "run", "--launcher", "mpirun", "--tee", "all", "--hosts", "node0:1,node2:1", show)
    assert [r["host"] for r in outputs(by_ssh)] == ["node0", "node2"]


def test_an_exclusive_step_does_not_block_a_job(queue: Queue, show: Path, tmp_path: Path) -> None:
    """Slurm would make an ordinary step wait for the end of the exclusive one."""
    with queue.allocation("--nodes=2", "--exclusive") as allocation:
        environ = clean_environment(LC_ALL="C.UTF-8", **allocation)
        alone = ["srun", "--exclusive", "-N1", "-n1", "-c", str(CPUS), "--nodelist=node0"]
        argv = [*alone, "sh", "-c", "echo up; exec sleep 300"]
        with bounded(queue.start("login", argv, env=environ)) as step:
            assert step.stdout
            assert step.stdout.readline() == "up\n"
            done = queue.run("login", [*CPULAUNCH, *STEP, show], directory=tmp_path, env=environ)
            assert step.poll() is None
    assert [r["host"] for r in outputs(done)] == ["node0", "node1"]


def test_a_job_within_a_step_has_the_cpus_of_the_step(queue: Queue, show: Path, tmp_path: Path) -> None:
    """Several such steps may share a node, as in a sweep over hyperparameters."""
    step = ["srun", "--exact", "-N1", "-n1", "-c1", *CPULAUNCH, "run", "--launcher", "local", "-n", "1"]
    with queue.allocation("--nodes=1", "--exclusive") as allocation:
        environ = clean_environment(LC_ALL="C.UTF-8", **allocation)
        done = queue.run("login", [*step, "--tee", "all", show], directory=tmp_path, env=environ)
    assert len(json.loads(done.stdout)["cores"]) == 1, done.stderr


class TestNoStepCanBeStarted:
    def test_outside_of_an_allocation(self, queue: Queue, show: Path, tmp_path: Path) -> None:
        argv = [*CPULAUNCH, "run", "--launcher", "slurm", show]
        environ = clean_environment(LC_ALL="C.UTF-8", **queue.environment)
        done = queue.run("login", argv, directory=tmp_path, env=environ)
        assert done.returncode == 2
        assert "launcher (--launcher): srun needs an allocation, but there is none" in done.stderr

    @pytest.mark.parametrize("options", [repeat(["--launcher", "slurm"]), ["-ppn", "1"]])
    def test_on_hosts_outside_of_the_allocation(self, options: list[str], salloc: Run, show: Path) -> None:
        """ssh would also reach them."""
        done = salloc("-N2 --exclusive", "run", *options, "--hosts", "node0,node3", show)
        assert done.returncode == 2
        assert "hosts.list (--hosts): node3 is not among the nodes of Slurm job" in done.stderr
        assert done.stdout == ""

    def test_after_the_allocation_has_ended(self, queue: Queue, show: Path, tmp_path: Path) -> None:
        with queue.allocation("--nodes=2") as gone:
            pass
        argv = [*CPULAUNCH, "run", "--launcher", "slurm", show]
        environ = clean_environment(LC_ALL="C.UTF-8", **gone)
        done = queue.run("login", argv, directory=tmp_path, env=environ)
        assert done.returncode == 2, done.stderr
        assert re.search(r"\$SLURM_JOB_ID=\d+ is [A-Z]+: the job no longer has its nodes", done.stderr)
        assert "srun needs an allocation, but there is none" in done.stderr
