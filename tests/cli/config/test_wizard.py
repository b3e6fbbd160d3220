"""The wizard, operated through a pseudo-terminal as by a user."""

from __future__ import annotations

import json
import os
import re
import select
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import Run
from support.marks import repeat
from support.terminal import CTRL_C, CTRL_D, CTRL_U, DOWN, ENTER, ESCAPE, UP, Terminal, question_of

from cpulaunch.cli.terminal import drop_keys
from cpulaunch.config.load import load

Start = Callable[..., Terminal]

WHERE, MPI, INTERFACE = map(question_of, ("hosts.hostfile", "mpi.flavour", "ccl.interface"))
INSTANCES, CORES = map(question_of, ("instances.count", "instances.cores_per_instance"))
RANKS, BACKEND = map(question_of, ("hosts.nproc_per_node", "training.backend"))
PRECISION, ENGINE, LOGS = map(question_of, ("training.precision", "training.engine", "output.log_dir"))
NOW = "What next?"
ONE_MACHINE = [WHERE, INSTANCES, RANKS, BACKEND, PRECISION, ENGINE, LOGS, NOW]
FOUR_NODES = [WHERE, MPI, INTERFACE, INSTANCES, RANKS, BACKEND, PRECISION, ENGINE, LOGS, NOW]
"""The questions, in order, if ccl can't be used.  With ccl, there is also the number of workers."""

# With ccl, there would be another question.  With gloo, the questions are the same on all machines.
GLOO = ("--set", "training.backend=gloo")
CPUS = len(os.sched_getaffinity(0))
SCRIPT = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"

pytestmark = pytest.mark.slow


def asked(questions: list[str]) -> list[str]:
    """Return the questions without those that the wizard skips if the backend is already given."""
    return [question for question in questions if question not in (BACKEND, INSTANCES)]


def said(directory: Path) -> dict[str, object]:
    """Return the settings in the written file."""
    config = load(file=directory / "cpulaunch.yaml", environ={})
    return {setting.key: given.value for setting, given in config.given.items()}


def accept(terminal: Terminal, questions: list[str]) -> None:
    """Accept the default answer to each question."""
    for question in questions:
        terminal.answers(question)


def left_behind(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


# ---- the written file


def test_settings_for_one_machine_are_written_and_run(wizard: Start, cpulaunch: Run, tmp_path: Path) -> None:
    terminal = wizard(*GLOO)
    terminal.answers(WHERE)
    ranks = min(2, CPUS)
    terminal.answers(RANKS, str(ranks))
    terminal.sees("each number is a core's rank")
    accept(terminal, asked(ONE_MACHINE[3:]))
    terminal.sees("Written: cpulaunch.yaml")
    terminal.sees("cpulaunch run train.py")
    assert terminal.ends() == 0
    assert said(tmp_path)["hosts.nproc_per_node"] == ranks
    assert left_behind(tmp_path) == ["cpulaunch.yaml"]

    assert cpulaunch("config", "validate", "cpulaunch.yaml").returncode == 0
    (tmp_path / "train.py").write_text(SCRIPT)
    done = cpulaunch("run", "train.py")
    assert done.returncode == 0, done.stderr
    assert f"rank {ranks - 1} of {ranks}\n" in done.stdout


def test_a_hostfile_in_the_directory_is_offered(
    wizard: Start, cpulaunch: Run, tmp_path: Path, four_nodes: Path
) -> None:
    terminal = wizard(*GLOO)
    terminal.sees("hostfiles/four-nodes: 4 hosts (node[1-4])")
    terminal.answers(WHERE, DOWN)
    accept(terminal, asked(FOUR_NODES[1:3]))
    terminal.answers(RANKS, "1")
    accept(terminal, asked(FOUR_NODES[5:-1]))
    terminal.sees("4 ranks on 4 hosts (node[1-4])")
    terminal.answers(NOW)
    assert terminal.ends() == 0
    assert said(tmp_path)["hosts.hostfile"] == "hostfiles/four-nodes"
    (tmp_path / "train.py").write_text(SCRIPT)
    done = cpulaunch("run", "--dry-run", "--format", "json", "train.py")
    plan = json.loads(done.stdout)
    assert (plan["world_size"], [host["host"] for host in plan["hosts"]]) == (
        4,
        ["node1", "node2", "node3", "node4"],
    )


def test_typed_hosts_are_checked_and_written_to_a_hostfile(wizard: Start, tmp_path: Path) -> None:
    terminal = wizard(*GLOO)
    terminal.answers(WHERE, UP)  # moves up from the first option to the last
    terminal.sees("Which hosts?")
    terminal.types("10.0.0.1:x")
    terminal.sees("'x' is not a number of slots")  # shown while the answer is typed
    terminal.types(CTRL_U, "10.0.0.[1-4]:2", ENTER)
    terminal.answers("Which hostfile should they be written to?")
    accept(terminal, asked(FOUR_NODES[1:]))
    terminal.sees("Written: hostfile")
    assert terminal.ends() == 0
    assert [
        line for line in (tmp_path / "hostfile").read_text().splitlines() if not line.startswith("#")
    ] == [f"10.0.0.{i} slots=2" for i in range(1, 5)]
    assert said(tmp_path)["hosts.hostfile"] == "hostfile"


def test_in_an_allocation_its_hosts_are_offered_but_not_written(wizard: Start, tmp_path: Path) -> None:
    terminal = wizard(*GLOO, SLURM_JOB_NODELIST="node[1-2]", SLURM_JOB_ID="12")
    terminal.sees("Slurm job 12, 2 hosts (node[1-2])")
    accept(terminal, asked(FOUR_NODES[:-1]))
    terminal.sees("2 ranks on 2 hosts (node[1-2])")
    terminal.types(ENTER)
    assert terminal.ends() == 0
    assert not {"hosts.hostfile", "hosts.list", "launcher"} & set(said(tmp_path))


@pytest.mark.repeats
def test_an_allocation_with_only_this_machine_gives_a_local_job(wizard: Start, tmp_path: Path) -> None:
    terminal = wizard(*GLOO, SLURM_JOB_NODELIST="node[1-2]", SLURM_JOB_ID="12")
    terminal.answers(WHERE, UP)
    accept(terminal, asked(ONE_MACHINE[1:]))
    assert terminal.ends() == 0
    assert said(tmp_path)["launcher"] == "local"


def test_slurms_nodes_are_offered_if_jobs_can_be_submitted(wizard: Start, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (sbatch := tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    terminal = wizard(*GLOO, PATH=f"{sbatch.parent}:{os.environ['PATH']}")
    terminal.answers(WHERE, DOWN)
    accept(terminal, asked(ONE_MACHINE[1:-1]))
    terminal.sees("on each node like this machine")
    terminal.sees("started by srun")
    terminal.answers(NOW)
    terminal.sees("Next:    cpulaunch submit --nodes 4 train.py")
    assert terminal.ends() == 0
    assert said(tmp_path)["launcher"] == "slurm"


def test_any_other_setting_can_be_changed_at_the_end(wizard: Start, tmp_path: Path) -> None:
    terminal = wizard(*GLOO)
    accept(terminal, asked(ONE_MACHINE[:-1]))
    terminal.answers(NOW, DOWN, DOWN)
    terminal.answers("In which section?", DOWN)
    terminal.answers("Which setting?", *[DOWN] * 7)
    terminal.answers("hosts.master_port", "70000")
    terminal.sees("70000: expected a whole number from 1 to 65535")
    terminal.answers("hosts.master_port", "29501")
    terminal.answers(NOW, DOWN, DOWN)
    terminal.answers("In which section?", *[DOWN] * 5)
    terminal.answers("Which setting?", *[DOWN] * 3)
    terminal.answers("cpu.bind_numa", UP)
    terminal.answers(NOW)
    assert terminal.ends() == 0
    assert (said(tmp_path)["hosts.master_port"], said(tmp_path)["cpu.bind_numa"]) == (29501, True)


def test_instances_are_offered_and_run(wizard: Start, cpulaunch: Run, tmp_path: Path) -> None:
    terminal = wizard()
    terminal.answers(WHERE)
    terminal.answers(INSTANCES, str(min(2, CPUS)))
    terminal.answers(CORES, "1")
    terminal.sees("each number is a core's instance")
    accept(terminal, [PRECISION, ENGINE, LOGS])
    terminal.sees("no process group, precision")
    terminal.answers(NOW)
    terminal.sees("Next:    cpulaunch run infer.py")
    assert terminal.ends() == 0
    written = said(tmp_path)
    assert (written["instances.count"], written["instances.cores_per_instance"]) == (min(2, CPUS), 1)
    (tmp_path / "infer.py").write_text("import os; print('number', os.environ['CPULAUNCH_INSTANCE'])")
    done = cpulaunch("run", "infer.py")
    assert f"number {min(2, CPUS) - 1}\n" in done.stdout, done.stderr


# ---- going back, leaving, wrong answers


def test_escape_goes_back_and_keeps_the_answers(wizard: Start, tmp_path: Path) -> None:
    (tmp_path / "cpulaunch.yaml").write_text("training: {precision: bf16}\n")
    terminal = wizard(*GLOO)
    terminal.answers(WHERE)
    terminal.answers(RANKS, "1")
    terminal.answers(PRECISION, DOWN)  # fp32, so there is no question about the engine
    terminal.sees(LOGS)
    terminal.types(ESCAPE)
    terminal.sees("(back)")
    terminal.answers(PRECISION, UP)
    terminal.sees(ENGINE)
    terminal.types(ESCAPE)
    terminal.sees(PRECISION)
    terminal.types(ESCAPE)
    terminal.sees("[1]")  # the answer is now the default
    terminal.types(ESCAPE)
    terminal.sees(WHERE)
    terminal.types(ESCAPE)
    terminal.sees("(this is the first question)")
    accept(terminal, [WHERE, RANKS, PRECISION, ENGINE, LOGS, NOW])
    assert terminal.ends() == 0
    assert (said(tmp_path)["hosts.nproc_per_node"], said(tmp_path)["training.precision"]) == (1, "bf16")


@pytest.mark.repeats
def test_escape_at_the_hosts_returns_to_the_first_question(wizard: Start, tmp_path: Path) -> None:
    terminal = wizard(*GLOO)
    terminal.answers(WHERE, UP)
    terminal.sees("Which hosts?")
    terminal.types(ESCAPE)
    terminal.answers(WHERE, UP, UP)
    terminal.answers("Which hostfile?", "nowhere")
    terminal.sees("hostfile nowhere: cannot be read")
    terminal.sees("Which hostfile?")
    terminal.types(ESCAPE)
    terminal.answers(WHERE, DOWN, UP)
    accept(terminal, asked(ONE_MACHINE[1:]))
    assert terminal.ends() == 0
    assert "hosts.hostfile" not in said(tmp_path)


@pytest.mark.parametrize(
    "number", [repeat(each) if 0 < each < len(FOUR_NODES) - 2 else each for each in range(len(FOUR_NODES))]
)
def test_control_c_at_any_question_leaves_no_files(
    wizard: Start, tmp_path: Path, four_nodes: Path, number: int
) -> None:
    key = CTRL_D if FOUR_NODES[number] == LOGS else CTRL_C
    set_it = () if FOUR_NODES[number] in (BACKEND, INSTANCES) else GLOO
    questions = FOUR_NODES[: number + 1] if not set_it else asked(FOUR_NODES[: number + 1])
    terminal = wizard(*set_it)
    if len(questions) > 1:
        terminal.answers(WHERE, DOWN)
        accept(terminal, questions[1:-1])
    terminal.sees(questions[-1])
    terminal.types(key)
    terminal.sees("Nothing was written.")
    assert terminal.ends() == 130
    assert "Traceback" not in terminal.text
    assert left_behind(tmp_path) == ["hostfiles/four-nodes"]


@pytest.mark.repeats
def test_leaving_at_the_end_writes_nothing(wizard: Start, tmp_path: Path) -> None:
    terminal = wizard(*GLOO)
    accept(terminal, asked(ONE_MACHINE[:-1]))
    terminal.answers(NOW, UP)
    terminal.sees("Nothing was written.")
    assert terminal.ends() == 0
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("questions", [[WHERE], [WHERE, INSTANCES]], ids=["menu", "text"])
def test_control_d_leaves_no_files(wizard: Start, tmp_path: Path, questions: list[str]) -> None:
    terminal = wizard()
    accept(terminal, questions[:-1])
    terminal.sees(questions[-1])
    terminal.types(CTRL_D)
    terminal.sees("Nothing was written.")
    assert terminal.ends() == 130
    assert left_behind(tmp_path) == []


@pytest.mark.repeats
def test_more_instances_than_cores_are_refused_at_once(wizard: Start) -> None:
    terminal = wizard()
    terminal.answers(WHERE)
    terminal.answers(INSTANCES, "4096")
    terminal.sees("4096 instances do not fit on")
    terminal.types(CTRL_U)
    terminal.answers(INSTANCES, "none")
    terminal.sees(RANKS)
    terminal.types(CTRL_C)
    assert terminal.ends() == 130


def test_after_a_wrong_number_of_ranks_the_question_is_repeated(wizard: Start) -> None:
    terminal = wizard(*GLOO)
    terminal.answers(WHERE)
    terminal.answers(RANKS, "two")
    terminal.sees("two: expected a whole number of at least 1, or auto")
    terminal.answers(RANKS, str(CPUS + 1000))
    terminal.sees(f"{CPUS + 1000}: {CPUS + 1000} ranks do not fit on")
    terminal.answers(RANKS, "1")
    terminal.sees(PRECISION)


# ---- existing files


def test_an_existing_file_gives_the_defaults_and_is_kept(wizard: Start, tmp_path: Path) -> None:
    path = tmp_path / "cpulaunch.yaml"
    path.write_text("cpulaunch: 1\nhosts: {nproc_per_node: 1}\nwatch: {grace_period: 7}\n")
    path.chmod(0o640)
    terminal = wizard(*GLOO)
    terminal.sees("its values are the defaults")
    terminal.answers(WHERE)
    terminal.sees(RANKS)
    terminal.answers("[1]")
    accept(terminal, asked(ONE_MACHINE[2:-1]))
    terminal.sees("-hosts: {nproc_per_node: 1}")
    terminal.sees("+  nproc_per_node: 1")
    terminal.answers(NOW)
    terminal.sees("(the old file is now cpulaunch.yaml.bak)")
    assert terminal.ends() == 0
    assert said(tmp_path)["watch.grace_period"] == 7
    assert (tmp_path / "cpulaunch.yaml.bak").read_text().startswith("cpulaunch: 1\nhosts: {")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert left_behind(tmp_path) == ["cpulaunch.yaml", "cpulaunch.yaml.bak"]


def test_an_invalid_value_in_the_file_is_not_the_default_answer(wizard: Start, tmp_path: Path) -> None:
    (tmp_path / "cpulaunch.yaml").write_text(f"hosts: {{nproc_per_node: {CPUS + 1000}}}\n")
    terminal = wizard(*GLOO)
    terminal.answers(WHERE)
    terminal.sees(f"{CPUS + 1000} ranks do not fit on")
    terminal.sees(RANKS)
    terminal.answers("[auto]")
    accept(terminal, asked(ONE_MACHINE[3:]))
    assert terminal.ends() == 0
    assert said(tmp_path)["hosts.nproc_per_node"] == "auto"


def test_variables_that_override_the_file_are_pointed_out(wizard: Start) -> None:
    terminal = wizard(*GLOO, CPULAUNCH_TRAINING_PRECISION="fp32")
    accept(terminal, asked(ONE_MACHINE[:-1]))
    terminal.sees("note: $CPULAUNCH_TRAINING_PRECISION overrides this file")
    terminal.answers(NOW)
    assert terminal.ends() == 0


@pytest.mark.repeats
def test_the_wizard_goes_on_if_the_existing_file_is_invalid(wizard: Start, tmp_path: Path) -> None:
    (tmp_path / "cpulaunch.yaml").write_text("lancher: local\n")
    terminal = wizard(*GLOO)
    terminal.sees("cpulaunch.yaml:1: unknown key")
    accept(terminal, asked(ONE_MACHINE))
    assert terminal.ends() == 0


# ---- terminals


@pytest.mark.parametrize("columns", [repeat(80), 50])
def test_output_fits_narrow_terminals_without_colours(wizard: Start, four_nodes: Path, columns: int) -> None:
    terminal = wizard(*GLOO, columns=columns, LANG="C", NO_COLOR="1")
    terminal.answers(WHERE, DOWN)
    accept(terminal, asked(FOUR_NODES[1:]))
    assert terminal.ends() == 0
    assert terminal.text.isascii()
    styles = {number for code in re.findall(r"\x1b\[([0-9;]*)m", terminal.raw) for number in code.split(";")}
    assert not styles & {str(colour) for colour in (*range(30, 49), *range(90, 108))}
    # Lines with a question mark contain text that was erased when the question was answered.
    prose = [line for line in terminal.text.replace("\r", "\n").splitlines() if "?" not in line]
    assert [line for line in prose if len(line) > columns] == []


def test_without_a_terminal_the_error_suggests_defaults(cpulaunch: Run, tmp_path: Path) -> None:
    done = cpulaunch("config")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is no terminal" in done.stderr
    assert "--defaults" in done.stderr
    assert left_behind(tmp_path) == []


def test_a_terminal_that_cannot_move_its_cursor_is_refused(wizard: Start) -> None:
    terminal = wizard(TERM="dumb")
    terminal.sees("config asks questions, but $TERM is dumb")
    terminal.sees("--defaults")
    assert terminal.ends() == 2


def test_run_does_not_load_the_wizards_modules(tmp_path: Path) -> None:
    code = "import sys, cpulaunch.cli.run.command, cpulaunch.cli.config.command; print([m for m in sys.modules if m in %r])"
    heavy = ("questionary", "prompt_toolkit", "rich", "torch", "yaml", "psutil")
    done = subprocess.run([sys.executable, "-c", code % (heavy,)], capture_output=True, text=True, timeout=30)
    assert done.stdout == "[]\n"


def test_keys_before_the_first_question_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, keys = os.openpty()
    with open(keys, closefd=True) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        os.write(keyboard, b"typed ahead\n")
        assert select.select([stdin], [], [], 10)[0]
        drop_keys()
        assert not select.select([stdin], [], [], 0)[0]
    os.close(keyboard)
