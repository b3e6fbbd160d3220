"""``cpulaunch submit``: the plan, the log, and jobs that Slurm ends early."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command import REPOSITORY, bounded, clean_environment
from support.marks import repeat
from support.namespaces import until
from support.slurm import CPUS, Queue

from slurm.conftest import CPULAUNCH

pytestmark = pytest.mark.slow

LIMIT = 120.0

# The script's first run waits to be interrupted.
AGAIN = """\
import os, time
first = "SLURM_RESTART_COUNT" not in os.environ
print("first" if first else "again", flush=True)
if first:
    time.sleep(300)
"""

# The job ends like a program that has made steps without saving.
LOSES = ("--set", "watch.restartable=false")

Submit = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def submit(queue: Queue, tmp_path: Path) -> Iterator[Submit]:
    """Start ``cpulaunch submit ARGS`` on the host ``login``; its jobs are cancelled at the end."""

    def start(*arguments: object) -> subprocess.Popen[str]:
        environ = clean_environment(LC_ALL="C.UTF-8", **queue.environment)
        argv = [*CPULAUNCH, "submit", *map(str, arguments)]
        return queue.start("login", argv, directory=tmp_path, env=environ)

    yield start
    queue.slurm("scancel", "--user=root")


def job_number(submitted: subprocess.Popen[str]) -> str:
    """Wait until the job's number is printed, and return it."""
    assert submitted.stderr
    for line in submitted.stderr:
        if found := re.match(r"cpulaunch: Slurm job (\d+): ", line):
            return found[1]
    raise AssertionError("no job was submitted")


def test_the_plan_comes_first_and_follow_exits_with_the_jobs_code(submit: Submit, tmp_path: Path) -> None:
    program = "import os, sys\nprint('rank', os.environ['RANK'], 'is here')\nsys.exit(3)\n"
    (tmp_path / "fails.py").write_text(program)
    options = ("--nodes", 2, "-ppn", 1, "--launcher", "slurm", "--skip-preflight", "--follow")
    with bounded(submit(*options, "fails.py"), LIMIT) as job:
        out, error = job.communicate()
    assert job.returncode == 3, error
    assert re.search("rank [01] is here", out)  # the other rank may be ended before it prints
    assert "failed first" in out
    said = ("2 ranks on 2 hosts (", ": `tail -F slurm-", "has ended: FAILED, exit code 3")
    assert sorted(said, key=error.index) == list(said)
    assert re.search(r"2 hosts\), assumed to match the nodes of partition batch \(.* 4 GiB\)", error)
    assert f"cores 0-{CPUS - 1}," in error or CPUS == 1


@pytest.mark.parametrize("more", [(), repeat(("--open-mode=append",))], ids=["emptied", "appended to"])
def test_a_follower_shows_both_logs_without_their_earlier_content(
    more: tuple[str, ...], submit: Submit, tmp_path: Path
) -> None:
    (tmp_path / "fails.py").write_text("print('new')\nraise ValueError('boom')\n")
    for name in ("out", "errors"):
        (tmp_path / name).write_text("old\n" * 1000)
    options = ("--nodes", 1, "--follow", "-o", "out", "-e", "errors", *more)
    with bounded(submit(*options, "fails.py"), LIMIT) as job:
        out, error = job.communicate()
    assert job.returncode == 1, error
    assert "new" in out
    assert "ValueError: boom" in error
    assert "old" not in out + error
    assert ("old" in (tmp_path / "out").read_text()) == bool(more)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        repeat(("--nodes", 9), "--nodes=9: partition batch has 4 nodes"),
        repeat(
            ("--ntasks", 4 * CPUS + 1),
            f"{4 * CPUS + 1} CPUs, but 4 nodes of partition batch have at most {4 * CPUS}",
        ),
        (("-c", 64), f"64 CPUs per node, but nodes of partition batch have at most {CPUS}"),
    ],
)
def test_a_job_that_fits_no_node_is_refused_before_it_waits(
    options: tuple[object, ...], why: str, submit: Submit, queue: Queue, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    with bounded(submit(*options, "train.py"), LIMIT) as job:
        _, error = job.communicate()
    assert job.returncode == 2, error
    assert why in error
    assert queue.jobs() == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        repeat(("-p", "spaer"), "invalid partition specified: spaer"),
        repeat(("--nodes", "abc"), "abc"),
        (("--invented-in-2030=a",), "unrecognized option '--invented-in-2030=a'"),
    ],
)
def test_sbatch_reports_slurms_refusal(
    options: tuple[object, ...], why: str, submit: Submit, queue: Queue, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    with bounded(submit(*options, "train.py"), LIMIT) as job:
        _, error = job.communicate()
    assert job.returncode == 3, error
    assert "cpulaunch: error: sbatch: " in error
    assert why in error
    assert queue.jobs() == []


def test_newer_options_and_patterns_in_the_logs_directory_reach_slurm(
    submit: Submit, queue: Queue, tmp_path: Path
) -> None:
    """sbatch accepts options that cpulaunch doesn't read, and --wait ends with the job's exit code."""
    (tmp_path / "fails.py").write_text("import sys\nprint('here', flush=True)\nsys.exit(3)\n")
    (tmp_path / "root").mkdir()
    options = ("--nodes", 1, "-ppn", 1, "--output=%u/slurm-%j.out", "--propagate=NOFILE", "--wait")
    run = ("--launcher", "slurm", "--skip-preflight")
    with bounded(submit(*options, "--distribution", "block", *run, "fails.py"), LIMIT) as job:
        _, error = job.communicate()
    assert job.returncode == 3, error
    (log,) = (tmp_path / "root").iterdir()
    assert "here" in log.read_text()


def test_ctrl_c_leaves_the_job_running_and_scancel_ends_it_for_good(
    submit: Submit, queue: Queue, tmp_path: Path
) -> None:
    (tmp_path / "again.py").write_text(AGAIN)
    options = ("--nodes", 1, "--requeue", "--launcher", "slurm", "--skip-preflight", "--follow")
    with bounded(submit(*options, "again.py"), LIMIT) as job:
        assert job.stdout
        assert any("first" in line for line in job.stdout)
        queue.signal(job, signal.SIGINT)
        error = job.stderr.read() if job.stderr else ""
        assert job.wait() == 130
    found = re.search(r"Slurm job (\d+) continues: `tail -F slurm-\1.out`.* `scancel \1` ends it", error)
    assert found, error
    assert f"{found[1]} R" in queue.jobs()
    queue.slurm("scancel", found[1])
    until(lambda: not queue.jobs(), "the job's end", LIMIT)
    assert "JobState=CANCELLED" in queue.slurm("scontrol", "show", "job", found[1]).stdout


@pytest.mark.parametrize(
    ("more", "preempted"),
    [((), False), repeat((), True), repeat(LOSES, True)],
    ids=["limit", "early", "loses"],
)
def test_a_job_warned_before_its_first_step_is_requeued(
    more: tuple[str, ...], preempted: bool, submit: Submit, queue: Queue, tmp_path: Path
) -> None:
    """A preempted job is requeued, too, however it handles the signal."""
    (tmp_path / "again.py").write_text(AGAIN)
    given = ("--nodes", 1, "-p", "spare", "--requeue", "--launcher", "slurm", "--skip-preflight", "--follow")
    with bounded(submit(*given, *more, "again.py"), LIMIT) as job:
        number = job_number(job)
        assert job.stdout
        assert any("first" in line for line in job.stdout)
        if preempted:
            preempt(queue)
        else:
            queue.slurm("scancel", "--batch", "--signal=TERM", number)
        out = job.stdout.read()
        error = job.stderr.read() if job.stderr else ""
        assert job.wait() == 0, out + error
    assert ("it had made no step, so nothing is lost" in out) == (more != LOSES)
    assert "again" in out
    assert f"Slurm job {number} has ended (requeued 1×): COMPLETED, exit code 0" in error


def preempt(queue: Queue) -> None:
    """Run a job of another partition, which preempts the jobs of partition ``spare``."""
    urgent = ["srun", "--partition=urgent", "--nodes=4", "--exclusive", "true"]
    done = queue.run("login", urgent, timeout=LIMIT, env=clean_environment(**queue.environment))
    assert done.returncode == 0, done.stderr


def test_a_signal_during_the_inspection_of_hosts_loses_nothing(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    argv = [*CPULAUNCH, "run", "--launcher", "slurm", "--set", "watch.restartable=true", "train.py"]
    with queue.allocation("--nodes=2") as allocation, queue.without_slurmd("node1"):
        environ = clean_environment(LC_ALL="C.UTF-8", **allocation)
        with bounded(queue.start("login", argv, directory=tmp_path, env=environ), LIMIT) as job:
            asking = "srun --overlap"
            until(
                lambda: any(asking in line for line in queue.processes("login")), "hosts to be asked", LIMIT
            )
            queue.signal(job, signal.SIGTERM)
            _, error = job.communicate()
    assert job.returncode == 75, error
    assert "interrupted before the ranks were started; the job can be started again" in error


TRAINS = (REPOSITORY / "examples" / "checkpoint.py", "--steps", 1000)
EVERY = 20
SAVES = ("-ppn", 1, "--launcher", "slurm", "--skip-preflight", "--threads", 1, "--checkpoint-every", EVERY)


def went_on(before: str, after: str) -> bool:
    """Return whether the second run has continued to its end from where the first one had saved."""
    saved = re.search(r"saved step (\d+), ending with exit code 75", before)
    return bool(saved and f"resuming after step {saved[1]} " in after and "weights " in after)


@pytest.mark.repeats
def test_a_preempted_job_saves_is_requeued_and_continues(submit: Submit, queue: Queue) -> None:
    pytest.importorskip("sklearn")
    with bounded(submit("-N", 2, "-p", "spare", "--requeue", "--follow", *SAVES, *TRAINS), LIMIT) as job:
        assert job.stdout
        assert any("step 50:" in line for line in job.stdout)
        preempt(queue)
        out = job.stdout.read()
        error = job.stderr.read() if job.stderr else ""
        assert job.wait() == 0, out + error
    assert went_on(out, out), out
    assert "has ended (requeued 1×): COMPLETED, exit code 0" in error


def test_a_job_preempted_without_grace_continues_from_its_last_checkpoint(
    submit: Submit, queue: Queue
) -> None:
    """Slurm ends srun, and therefore the ranks, whether or not they have saved."""
    pytest.importorskip("sklearn")
    options = ("-N", 2, "-p", "abrupt", "--requeue", "--follow", *SAVES)
    with bounded(submit(*options, *TRAINS), LIMIT) as job:
        assert job.stdout
        assert any("step 100:" in line for line in job.stdout)
        preempt(queue)
        out = job.stdout.read()
        error = job.stderr.read() if job.stderr else ""
        assert job.wait() == 0, out + error
    assert "DUE TO PREEMPTION" in out
    assert "Traceback" not in out
    goes_on = re.search(r"resuming after step (\d+) ", out)
    assert goes_on, out
    assert int(goes_on[1]) >= EVERY
    assert "weights " in out
    assert "has ended (requeued 1×): COMPLETED, exit code 0" in error


@pytest.mark.repeats
def test_a_job_saves_before_its_real_time_limit(submit: Submit) -> None:
    """The limit is two minutes, the shortest with which Slurm can send a warning."""
    pytest.importorskip("sklearn")
    limit = ("--time", 2, "--signal=B:TERM@30", "--grace-period", 25)
    endless = (TRAINS[0], "--steps", 10**6)
    with bounded(submit("-N", 1, *limit, "--requeue", "--follow", *SAVES, *endless), 2 * LIMIT) as job:
        assert job.stdout
        number = job_number(job)
        out = ""
        for line in job.stdout:
            out += line
            if "resuming after step" in line:
                break
    assert went_on(out + "weights ", out + "weights "), number + out


@pytest.mark.repeats
def test_a_chain_of_jobs_resumes_from_where_the_previous_one_got_its_warning(
    submit: Submit, queue: Queue, tmp_path: Path
) -> None:
    """The array of two jobs is from docs/slurm.md.  The test sends the signal; limits have whole minutes."""
    pytest.importorskip("sklearn")
    page = (REPOSITORY / "docs" / "slurm.md").read_text()
    (words,) = re.findall(r"^\$ cpulaunch submit --nodes 4 (.*--array.*) train.py$", page, re.M)
    array = words.replace("--array=1-5%1", "--array=1-2%1").split()
    with bounded(submit("--nodes", 2, *array, *SAVES, *TRAINS), LIMIT) as submitted:
        number = job_number(submitted)
        assert submitted.wait() == 0
    first, second = (tmp_path / f"slurm-{number}_{task}.out" for task in (1, 2))
    until(lambda: first.exists() and "step 50:" in first.read_text(), "the first steps", LIMIT)
    queue.slurm("scancel", "--batch", "--signal=TERM", f"{number}_1")
    until(lambda: not queue.jobs(), "the chain's end", LIMIT)
    assert went_on(first.read_text(), second.read_text()), first.read_text() + second.read_text()
