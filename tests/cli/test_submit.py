"""``cpulaunch submit``: whose options are whose, and the script that comes of it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY

from cpulaunch.cli import job_plan
from cpulaunch.cli.main import main
from cpulaunch.manifests.sbatch import batch_script, limit, share

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
{RUN} --restartable --grace-period=110 -m train &
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
def test_options_of_sbatch_become_its_lines_and_the_others_stay_the_jobs(
    typed: str, text: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--dry-run", *shlex.split(typed)]) == 0
    assert capsys.readouterr().out == text


def test_sbatchs_letters_and_its_log(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = "-N 4 -o logs/%j.out -e err --no-kill -D /scratch train.py"
    assert main(["submit", "--dry-run", *typed.split()]) == 0
    lines = re.findall(r"^#SBATCH (--\S+)", capsys.readouterr().out, re.M)
    said = ["--nodes=4", "--output=logs/%j.out", "--error=err", "--no-kill", "--chdir=/scratch"]
    assert lines == ["--job-name=train", *said, "--exclusive"]


def test_the_script_is_kept_where_that_is_asked_for(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--dry-run", "--output", "kept.sh", "--nodes", "2", "train.py"]) == 0
    assert (tmp_path / "kept.sh").read_text() == capsys.readouterr().out
    assert main(["submit", "--dry-run", "--output", "kept.sh", "--nodes", "3", "train.py"]) == 0
    assert "kept.sh was there before: that is now kept.sh.bak\n" in capsys.readouterr().err
    assert "--nodes=2" in (tmp_path / "kept.sh.bak").read_text()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--nodse 4 train.py", "unknown option --nodse"),
        ("--nodes 4 gone.py", "gone.py: no such script"),
        ("--nodes 4 --backend nccl train.py", "'nccl' is not valid for training.backend"),
        ("--to pbs train.py", "invalid choice: 'pbs'"),
        ("--nodes 4 --format json train.py", "--format is for `cpulaunch run --dry-run`"),
        ("--nodes 4 --follow -a 1-5%1 train.py", "--follow is for one job, and --array makes several"),
        (
            "--to kubernetes --image i --follow train.py",
            "--follow is for Slurm, and this job is for kubernetes",
        ),
        ("--time 3 --requeue train.py", "--time 3: Slurm may warn the job 180 s before its end"),
        ("--nodes 4 -ppn 9 --lscpu lscpu train.py", "9 ranks"),
        ("--nodes 4 --output logs/%j.out train.py", "hint: -o logs/%j.out names the log"),
        ("--nodes 4 --output ./train.py train.py", "would overwrite what the job is to run"),
        ("--nodes 4 job.sh", "job.sh is a script of bash, and ranks run Python"),
        (
            "-N 4 torchrun --nproc-per-node 2 train.py",
            "type: cpulaunch submit --dry-run -N 4 --nproc-per-node 2 train.py",
        ),
        ("-N 4 srun python train.py", "type: cpulaunch submit --dry-run -N 4 train.py"),
    ],
)
def test_what_run_would_refuse_is_refused_before_the_job_waits(
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
        "cpulaunch: planned: 7 ranks on 4 nodes, gloo, bf16",
        "cpulaunch:   node 1 … node 3 (3 hosts), assumed to match the one in lscpu",
        "cpulaunch:     local rank 0: cores 0-3, NUMA 0, 4 threads",
        "cpulaunch:     local rank 1: cores 4-7, NUMA 0, 4 threads",
        "cpulaunch:   node 4, assumed to match the one in lscpu",
        "cpulaunch:     local rank 0: cores 0-7, NUMA 0, 8 threads",
    ]
    assert "lscpu" not in out


def test_the_page_shows_the_plan_that_comes_of_slurms_description(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (sinfo := script.parent / "sinfo").write_text("#!/bin/sh\necho 'batch*|2|28|2|256000|96|(null)'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.setattr(job_plan, "ensure_ccl", lambda config, build, tell: None)  # as where it is built
    page = (REPOSITORY / "docs" / "slurm.md").read_text()
    words, shown = re.findall(r"^\$ cpulaunch (submit .* --follow .*)\n((?:cpulaunch: .*\n)+)", page, re.M)[0]
    assert main(["submit", "--dry-run", *words.split()[1:]]) == 0
    assert shown.startswith(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("2:00:00", 7200), ("1-12", 129600), ("1-2:30", 95400), ("x", None)],
)
def test_a_time_limit(time: str, seconds: int | None) -> None:
    assert limit({"--time": time}) == seconds


def test_where_nobody_describes_the_nodes_a_line_says_so(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "--dry-run", "--nodes", "2", "train.py"]) == 0
    assert "no plan is shown, as Slurm doesn't describe the nodes (sinfo" in capsys.readouterr().err


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
    ],
)
def test_what_a_job_asks_of_its_nodes(
    options: dict[str, str], tasks: tuple[int, ...], cpus: int | None
) -> None:
    assert share(options, 16) == (tasks, cpus)


def test_where_there_is_no_sbatch(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "--nodes", "2", "train.py"]) == 3
    assert "--dry-run prints the script, to be submitted elsewhere" in capsys.readouterr().err


def test_what_the_user_says_of_signal_and_mode_stays() -> None:
    options = ["--requeue", "--signal=B:USR1@60", "--open-mode=truncate"]
    text = batch_script(options, ["cpulaunch", "run", "train.py"])
    assert [line for line in text.splitlines() if "signal=" in line or "mode=" in line] == [
        "#SBATCH --signal=B:USR1@60",
        "#SBATCH --open-mode=truncate",
    ]


def test_the_pages_commands_are_understood(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "slurm.md").read_text()
    commands = re.findall(r"^\$ cpulaunch (submit .*)$", page, re.M)
    assert len(commands) > 2
    for command in commands:
        assert main(["submit", "--dry-run", *shlex.split(command)[1:]]) == 0
        assert capsys.readouterr().out.startswith(
            "#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --nodes=4\n"
        )


def test_the_page_shows_what_is_printed(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "slurm.md").read_text()
    command, _, shown = page.partition("$ cpulaunch submit --nodes 4 --time 12:00:00 --requeue ")[
        2
    ].partition("\n")
    assert main(["submit", "--nodes", "4", "--time", "12:00:00", "--requeue", *command.split()]) == 0
    printed = capsys.readouterr().out.replace(shlex.quote(sys.executable), "/venv/bin/python")
    assert shown.startswith(printed + "```")


def test_a_requeued_job_waits_as_the_page_on_restarts_has_it() -> None:
    page = (REPOSITORY / "docs" / "restarts.md").read_text()
    ours = batch_script(["--requeue"], ["cpulaunch", "run", "train.py"])
    _, waits, after = ours.partition("while wait")
    assert waits + after in page
