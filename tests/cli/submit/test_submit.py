"""``cpulaunch submit``: options of sbatch and of the job, and the resulting batch script."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from getpass import getuser
from pathlib import Path

import pytest
from support.command import REPOSITORY

from cpulaunch.cli.main import main
from cpulaunch.cli.submit import job_plan
from cpulaunch.queues.slurm.follow import log_of_array
from cpulaunch.queues.slurm.options import limit, share
from cpulaunch.queues.slurm.script import batch_script

RUN = f"{shlex.quote(sys.executable)} -m cpulaunch run"

PLAIN = f"""\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --time=2:00:00
#SBATCH --partition=batch
#SBATCH --job-name='my job'
#SBATCH --exclusive
exec {RUN} -ppn 2 --threads=1 -x HF_TOKEN train.py --time 3 --requeue
"""

REQUEUED = f"""\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --open-mode=append
{RUN} --set=watch.restartable=true --grace-period=110 -m train &
trap 'kill -TERM $!' TERM USR1 USR2
while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done  # the signal interrupts wait
job=$(scontrol show job "$SLURM_JOB_ID")  # after scancel, it is COMPLETING
if [[ $job = *JobState=RUNNING* && ( $code -eq 75 || $code -ne 0 && $job = *PreemptTime=[0-9]* ) ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    (path := tmp_path / "train.py").touch()
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=4\nsrun torchrun train.py\n")
    (tmp_path / "lscpu").write_text("# CPU,CORE,SOCKET,NODE\n" + "".join(f"{i},{i},0,0\n" for i in range(8)))
    return path


@pytest.fixture
def slurm(script: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A function that puts a fake program of Slurm on the PATH; the program runs the given shell commands."""
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")

    def put(program: str, commands: str) -> None:
        (path := script.parent / program).write_text(f"#!/bin/sh\n{commands}\n")
        path.chmod(0o755)

    return put


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (
            "--nodes 4 -ppn 2 -t 2:00:00 --partition=batch --threads 1 --job_name 'my job' -x HF_TOKEN "
            "train.py --time 3 --requeue",
            PLAIN,
        ),
        ("-N 2 -c 8 --requeue -m train", REQUEUED),
    ],
)
def test_options_of_sbatch_become_directives_and_others_go_to_run(
    typed: str, text: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--dry-run", *shlex.split(typed)]) == 0
    assert capsys.readouterr().out == text


def test_short_options_of_sbatch_are_known(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script.parent / "logs").mkdir()
    typed = "-N4 -pbatch -t 30 -ppn 2 -o logs/%j.out -e err --no-kill -n 8 train.py"
    assert main(["submit", "--dry-run", *typed.split()]) == 0
    out = capsys.readouterr().out
    lines = re.findall(r"^#SBATCH (--\S+)", out, re.M)
    said = ["--nodes=4", "--partition=batch", "--time=30", "--output=logs/%j.out", "--error=err", "--no-kill"]
    assert lines == ["--job-name=train", *said, "--exclusive"]
    assert f"exec {RUN} -ppn 2 -n 8 train.py" in out


def test_paths_are_relative_to_the_jobs_directory(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (there := script.parent / "there").mkdir()
    assert main(["submit", "--dry-run", "-D", "there", "train.py"]) == 2
    assert f"train.py: no such script in {there}" in capsys.readouterr().err
    (there / "train.py").touch()
    (there / "cpulaunch.yaml").write_text("training: {backend: gloo}\n")
    typed = ["--output", "kept.sh", "--lscpu", "lscpu", "-D", "there", "train.py"]
    assert main(["submit", "--dry-run", *typed]) == 0
    assert "1 rank on 1 host (node1), " in capsys.readouterr().err
    assert f"#SBATCH --chdir={there}\n" in (script.parent / "kept.sh").read_text()
    assert Path.cwd() == script.parent


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--nnodes 2", "#SBATCH --nodes=2"),
        ("--nnodes 2:4 --ntasks 8", "#SBATCH --nodes=4"),
        ("--nodes 4 --nnodes 2:4", "#SBATCH --nodes=4"),
        (
            "--nodes 2 --nodelist node[0-1] --hosts node1,node0:2",
            f"exec {RUN} --hosts=node1,node0:2 train.py",
        ),
        ("--mem=0", "#SBATCH --exclusive"),
        ("--output=%u/slurm-%j.out", "#SBATCH --output=%u/slurm-%j.out"),
        ("--output=%N/slurm.out", "#SBATCH --output=%N/slurm.out"),
        ("--exclusive=user", "#SBATCH --exclusive=user"),
        ("--wait", "#SBATCH --wait"),
        ("--distribution block:cyclic", "#SBATCH --distribution=block:cyclic"),
        ("--invented-in-2030=a,b", "#SBATCH --invented-in-2030=a,b"),
        ("--invented-in-2031", "#SBATCH --invented-in-2031"),
        ("--rdzv-backend static", f"exec {RUN} --rdzv-backend=static train.py"),
    ],
)
def test_supported_options_of_sbatch_are_accepted(
    typed: str, line: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script.parent / getuser()).mkdir()
    assert main(["submit", "--dry-run", *typed.split(), "train.py"]) == 0
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("typed", "signal", "grace"),
    [
        ("--requeue", "B:TERM@120", "110"),
        ("--requeue --grace-period 300", "B:TERM@310", "300"),
        ("--requeue --signal=B:USR1@600", "B:USR1@600", "590"),
        ("--requeue --signal=B:10", "B:10", "50"),
        ("--requeue --signal=B:TERM@120 --grace-period 120", "B:TERM@120", "120"),
        ("--requeue --signal=TERM@60 --launcher slurm", "TERM@60", "50"),
        ("--array=1-5%1 --signal=B:TERM@120", "B:TERM@120", "110"),
        ("--signal=B:HUP@60", "B:HUP@60", None),
    ],
)
def test_the_grace_period_is_the_time_between_signal_and_time_limit(
    typed: str, signal: str, grace: str | None, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--dry-run", *typed.split(), "train.py"]) == 0
    out = capsys.readouterr().out
    assert re.findall("--signal=(.*)", out) == [signal]
    assert re.findall(r"--grace-period=(\S+)", out) == [grace] * (grace is not None)
    assert ("--set=watch.restartable=true" in out) == ("--requeue" in typed)


@pytest.mark.parametrize("time", ["2", "3", "2:30"])
def test_the_suggested_remedies_for_a_short_time_limit_work(
    time: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["submit", "--dry-run", "--requeue"]
    assert main([*typed, "--time", time, "train.py"]) == 2
    longer, _, later = (
        capsys.readouterr().err.partition("hint: use ")[2].partition(" or more, or a later warning: ")
    )
    assert main([*typed, longer, "train.py"]) == 0
    assert main([*typed, "--time", time, *later.split(), "train.py"]) == 0


def test_the_script_is_kept_on_request(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--dry-run", "--output", "kept.sh", "--nodes", "2", "train.py"]) == 0
    assert (tmp_path / "kept.sh").read_text() == capsys.readouterr().out
    assert main(["submit", "--dry-run", "--output", "kept.sh", "--nodes", "3", "train.py"]) == 0
    assert "kept.sh existed; the old file is now kept.sh.bak\n" in capsys.readouterr().err
    assert "--nodes=2" in (tmp_path / "kept.sh.bak").read_text()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--nodes 4 gone.py", "gone.py: no such script"),
        ("--nodes 4 --format json train.py", "--format is for `cpulaunch run --dry-run`"),
        ("", "hint: cpulaunch submit [OPTIONS] train.py"),
        ("--patition=batch train.py", "unknown option --patition; did you mean '--partition'?"),
        ("--nodse 4 train.py", "submit --help-all` lists the options, and sbatch(1) those of Slurm"),
        ("--wrap hostname train.py", "submit doesn't support --wrap"),
        ("-f missing train.py", "hostfile missing: cannot be read: No such file"),
        ("-N 2 --hosts a,b train.py", "hosts.list (--hosts): Slurm may not give the job a, b"),
        ("-N 2 --hosts a,b -w b train.py", "Slurm may not give the job a\n"),
        ("--set hosts.exclude=a train.py", "hint: omit it, and use --exclude=a of sbatch"),
        (
            "-N 2 --machine_rank 0 train.py",
            "hint: leave it out, and start one `cpulaunch run` for all hosts: in a queue's job",
        ),
        ("-N 2 --launcher local train.py", "all ranks would be on the first of 2 nodes"),
        ("-D gone train.py", "--chdir gone: No such file or directory"),
        ("--ntasks 7 -n 3 train.py", "hosts.nproc (-n): 3 ranks, but sbatch's options request 7 tasks"),
        ("--ntasks-per-node 1 -N 4 -n 8 train.py", "8 ranks, but sbatch's options request 4 tasks"),
        ("-N 4 -n 6 train.py", "hosts.nproc (-n): 6 ranks can't be divided evenly over 4 hosts"),
        ("-x node0 train.py", "--exclude=node0 for a node to avoid"),
        ("-N 2 --nnodes 5 train.py", "hosts.nnodes (--nnodes): 5 of 2 nodes\ncpulaunch: hint: use --nodes=5"),
        ("--requeue --signal=B:INT@60 train.py", "hint: use --signal=B:TERM@60"),
        (
            "--requeue --signal=TERM@60 train.py",
            "--signal=TERM@60: without B:, Slurm sends it only to srun's",
        ),
        (
            "--requeue --signal=B:TERM@60 --grace-period 110 train.py",
            "Slurm ends the job 60 s later, but the grace period of the ranks is 110 s\n"
            "cpulaunch: hint: use --signal=B:TERM@120",
        ),
        ("--time 1:00 --requeue train.py", "hint: use --time=4 or more\n"),
        ("-o logs/%j.out train.py", "there is no directory logs, and Slurm doesn't create it"),
        ("-e logs/err train.py", "hint: mkdir -p logs"),
        ("--output=logs/%x.out train.py", "there is no directory logs, and Slurm doesn't create it"),
        ("-o %x/out train.py", "--output=%x/out: there is no directory train, and Slurm"),
        (
            "--nodes 4 --follow -a 1-5%1 train.py",
            "--follow can show only one job, but --array creates several",
        ),
        ("--time 3 --requeue train.py", "--time=3: Slurm may send the signal 180 s earlier"),
        ("--nodes 4 -ppn 9 --lscpu lscpu train.py", "9 ranks"),
        ("--nodes 4 --output ./train.py train.py", "would overwrite the job's script"),
        ("--nodes 4 job.sh", "job.sh is a bash script, and ranks run Python"),
        (
            "-N 4 torchrun --nproc-per-node 2 train.py",
            "type: cpulaunch submit --dry-run -N 4 --nproc-per-node 2 train.py",
        ),
    ],
)
def test_submit_refuses_what_run_would_refuse(
    typed: str, says: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--dry-run", *typed.split()]) == 2
    assert says in capsys.readouterr().err


def test_the_plan_is_shown_from_a_description_of_the_nodes(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "--nodes 4 --ntasks 7 --cpus-per-task 4 --backend gloo --lscpu lscpu train.py"
    assert main(["submit", "--dry-run", *typed.split()]) == 0
    out, error = capsys.readouterr()
    assert error.splitlines() == [
        "cpulaunch: 7 ranks on 4 hosts (node[1-4]), 4 to 8 threads each · planned: gloo, precision fp32 (not measured; "
        "the CPU's flags are not known) · started by srun (in an allocation of Slurm)",
        "cpulaunch:   node[1-3] (3 hosts), assumed to match the one in lscpu",
        "cpulaunch:     local rank 0: cores 0-3, NUMA 0, 4 threads",
        "cpulaunch:     local rank 1: cores 4-7, NUMA 0, 4 threads",
        "cpulaunch:   node4, assumed to match the one in lscpu",
        "cpulaunch:     local rank 0: cores 0-7, NUMA 0, 8 threads",
    ]
    assert "lscpu" not in out


def test_the_page_shows_the_plan_from_slurms_description(
    slurm: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm("sinfo", "echo 'batch*|2|28|2|256000|96|(null)'")
    monkeypatch.setattr(job_plan, "ensure_ccl", lambda config, build, tell: None)  # as if ccl were built
    page = (REPOSITORY / "docs" / "slurm.md").read_text()
    words, shown = re.findall(r"^\$ cpulaunch (submit .* --follow .*)\n((?:cpulaunch: .*\n)+)", page, re.M)[0]
    assert main(["submit", "--dry-run", *words.split()[1:]]) == 0
    assert shown.startswith(capsys.readouterr().err)


def test_the_plan_uses_the_named_hosts(
    script: Path, slurm: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm("sinfo", "echo 'batch*|1|8|1|4000|96|(null)'")
    (script.parent / "hosts").write_text("b slots=2\na slots=1\n")
    typed = ["-w", "a,b", "-f", "hosts", "--backend", "gloo", "train.py"]
    assert main(["submit", "--dry-run", *typed]) == 0
    error = capsys.readouterr().err
    assert "3 ranks on 2 hosts (b, a), " in error
    assert "  b, assumed to match the nodes of partition batch" in error


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (["--mem", "64G"], "with --mem, Slurm gives the job 1 of 8 CPUs of a node"),
        (["--ntasks", "6", "--nodes", "3"], "with --ntasks, Slurm gives the job 2 of 8 CPUs of a node"),
        (["--mem", "64G", "--exclusive"], ""),
        (["--ntasks", "8", "--nodes", "1"], ""),
    ],
)
def test_an_unrequested_small_share_of_a_node_gives_a_warning(
    options: list[str], warning: str, slurm: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm("sinfo", "echo 'batch*|1|8|1|256000|96|(null)'")
    assert main(["submit", "--dry-run", *options, "--backend", "gloo", "train.py"]) == 0
    error = capsys.readouterr().err
    assert (f"warning: {warning}" in error) if warning else ("Slurm gives the job" not in error)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (["--mem", "64G"], True),
        (["--ntasks-per-node", "1", "--nodes", "2"], True),
        (["--mem", "0"], False),
    ],
)
def test_a_job_with_one_cpu_gives_a_warning_even_without_facts_of_the_nodes(
    options: list[str],
    warned: bool,
    script: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "--dry-run", *options, "train.py"]) == 0
    assert ("Slurm gives the job 1 CPU of a node" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("options", "cores", "warned"),
    [
        (["--mem", "64G"], "cores 0, NUMA 0, 1 thread", True),
        (["--cpus-per-task", "5"], "cores 0-4, NUMA 0, 5 threads", False),
        (["--mem", "64G", "--exclusive"], "cores 0-7, NUMA 0, 8 threads", False),
    ],
)
def test_the_plan_uses_only_the_part_of_a_node_that_the_job_gets(
    options: list[str], cores: str, warned: bool, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [*options, "--backend", "gloo", "--lscpu", "lscpu", "train.py"]
    assert main(["submit", "--dry-run", *typed]) == 0
    error = capsys.readouterr().err
    assert f"local rank 0: {cores}" in error
    assert ("Slurm gives the job 1 of 8 CPUs of a node" in error) == warned


def test_warnings_of_sbatch_are_shown(
    slurm: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm("sbatch", "echo 7; echo 'sbatch: warning: late' >&2")
    assert main(["submit", "--nodes", "2", "train.py"]) == 0
    error = capsys.readouterr().err
    assert error.index("cpulaunch: sbatch: warning: late\n") < error.index("cpulaunch: Slurm job 7: ")


@pytest.mark.parametrize(
    ("sbatch", "code", "says"),
    [
        ("echo '7;east'; exit 3", 3, "cpulaunch: Slurm job 7: "),
        ("echo 'sbatch: error: Invalid wait' >&2; exit 1", 3, "cpulaunch: error: sbatch: Invalid wait"),
        ("echo 7", 0, "cpulaunch: Slurm job 7: "),
    ],
)
def test_with_wait_the_exit_code_is_the_jobs(
    sbatch: str, code: int, says: str, slurm: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm("sbatch", sbatch)
    assert main(["submit", "--nodes", "2", "--wait", "train.py"]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("2:00:00", 7200), ("1-12", 129600), ("1-2:30", 95400), ("x", None)],
)
def test_time_limits_of_slurm_are_parsed(time: str, seconds: int | None) -> None:
    assert limit({"--time": time}) == seconds


def test_a_message_says_that_facts_of_the_nodes_are_missing(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "--dry-run", "--nodes", "2", "train.py"]) == 0
    assert "no plan is shown, as Slurm doesn't describe the nodes (sinfo" in capsys.readouterr().err


NO_CONTROLLER = """\
sinfo: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sinfo: error: fetch_config: DNS SRV lookup failed
sinfo: fatal: Could not establish a configuration source
"""


def test_sinfos_failure_is_shown_in_brief(
    slurm: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm("sinfo", f"cat >&2 <<'END'\n{NO_CONTROLLER}END\nexit 1")
    assert main(["submit", "--dry-run", "--nodes", "2", "train.py"]) == 0
    assert "(sinfo: Could not establish a configuration source)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "tasks", "cpus"),
    [
        ({"--nodes": "4"}, (0,) * 4, None),
        ({"--nodes": "2-4"}, (0,) * 2, None),
        ({}, (0,), None),
        ({"--nodes": "4", "--ntasks": "7"}, (2, 2, 2, 1), 2),
        ({"--ntasks": "7", "--cpus-per-task": "4"}, (4, 3), 16),
        ({"--nodes": "2", "--ntasks-per-node": "2", "--exclusive": ""}, (2, 2), None),
        ({"--ntasks": "6", "--ntasks-per-node": "4"}, (3, 3), 3),
        ({"--mem": "4G", "--nodes": "many"}, (0,), 1),
        ({"--mem": "0"}, (0,), None),
    ],
)
def test_the_resources_that_a_job_requests(
    options: dict[str, str], tasks: tuple[int, ...], cpus: int | None
) -> None:
    assert share(options, 16) == (tasks, cpus)


def test_without_sbatch_the_error_suggests_a_dry_run(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "--nodes", "2", "train.py"]) == 3
    assert "use --dry-run to print the script" in capsys.readouterr().err


def test_the_users_open_mode_for_the_log_is_kept() -> None:
    text = batch_script([("--requeue", ""), ("--open-mode", "truncate")], ["cpulaunch", "run", "train.py"])
    assert re.findall("^#SBATCH .*mode=.*", text, re.M) == ["#SBATCH --open-mode=truncate"]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({}, "slurm-4711_*.out"),
        ({"--output": "logs/%A-%3a.out"}, "logs/4711-*.out"),
        ({"--output": "my %x%%.%j", "--job-name": "bert", "--chdir": "/scratch"}, "'/scratch/my 'bert%.*"),
    ],
)
def test_the_logs_of_a_job_array_are_named_by_a_shell_pattern(options: dict[str, str], pattern: str) -> None:
    assert log_of_array("4711", options) == pattern


def test_help_of_submit_omits_options_that_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["submit", "--help"])
    assert "--format" not in capsys.readouterr().out


def test_the_commands_on_the_page_are_valid(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "slurm.md").read_text()
    commands = re.findall(r"^\$ cpulaunch (submit .*)$", page, re.M)
    assert len(commands) > 2
    for command in commands:
        assert main(["submit", "--dry-run", *shlex.split(command)[1:]]) == 0
        assert capsys.readouterr().out.startswith(
            "#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --nodes=4\n"
        )


def test_the_output_on_the_page_is_current(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "slurm.md").read_text()
    command, _, shown = page.partition("$ cpulaunch submit --nodes 4 --time 12:00:00 --requeue ")[
        2
    ].partition("\n")
    assert main(["submit", "--nodes", "4", "--time", "12:00:00", "--requeue", *command.split()]) == 0
    printed = capsys.readouterr().out.replace(shlex.quote(sys.executable), "/venv/bin/python")
    assert shown.startswith(printed + "```")


def test_the_batch_script_waits_like_the_one_in_the_page_on_restarts() -> None:
    page = (REPOSITORY / "docs" / "restarts.md").read_text()
    ours = batch_script([("--requeue", "")], ["cpulaunch", "run", "train.py"])
    _, waits, after = ours.partition("while wait")
    assert waits + after in page
