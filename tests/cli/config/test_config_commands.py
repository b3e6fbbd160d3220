"""``cpulaunch config --defaults``, ``show``, ``validate`` and ``import``, run as real commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from support.command import REPOSITORY, Run

# ---- --defaults


def test_defaults_asks_no_questions_and_writes_the_values_given_by_set(
    cpulaunch: Run, tmp_path: Path
) -> None:
    done = cpulaunch(
        "config", "--defaults", "--set", "training.precision=fp32", "--set", "env=A=1", "--set", "env=B=2"
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "cpulaunch run train.py" in done.stderr
    written = yaml.safe_load((tmp_path / "cpulaunch.yaml").read_text())
    assert written["training"] == {"precision": "fp32"}
    assert written["env"] == {"A": "1", "B": "2"}
    assert written["hosts"] is None


def test_an_existing_file_is_replaced_only_with_force_and_kept_as_backup(
    cpulaunch: Run, tmp_path: Path
) -> None:
    path = tmp_path / "cpulaunch.yaml"
    path.write_text("launcher: local\n")
    done = cpulaunch("config", "--defaults")
    assert done.returncode == 2
    assert "-launcher: local" in done.stderr
    assert "--force" in done.stderr
    assert path.read_text() == "launcher: local\n"
    assert cpulaunch("config", "--defaults", "--force").returncode == 0
    assert (tmp_path / "cpulaunch.yaml.bak").read_text() == "launcher: local\n"
    again = cpulaunch("config", "--defaults")
    assert (again.returncode, "Unchanged" in again.stderr) == (0, True)


def test_backups_are_not_overwritten(cpulaunch: Run, tmp_path: Path) -> None:
    path = tmp_path / "cpulaunch.yaml"
    for content, backup in (
        ("1", "cpulaunch.yaml.bak"),
        ("2", "cpulaunch.yaml.bak.1"),
        ("3", "cpulaunch.yaml.bak.2"),
    ):
        path.write_text(f"cpulaunch: 1\nhosts: {{nproc: {content}}}\n")
        done = cpulaunch("config", "--defaults", "--force")
        assert f"the old file is now {backup})" in done.stderr
        assert f"nproc: {content}" in (tmp_path / backup).read_text()
    assert "nproc: 1" in (tmp_path / "cpulaunch.yaml.bak").read_text()


def test_a_linked_file_is_written_and_named_in_the_suggested_command(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to("deep/er/real.yaml")
    done = cpulaunch("config", "--defaults", "--config-file", "link.yaml")
    assert "cpulaunch run --config-file link.yaml train.py" in done.stderr
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "deep/er/real.yaml").read_text().startswith("# Settings")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--defaults", "--set", "ccl.workers=2"], "unknown setting 'ccl.workers'; did you mean"),
        (["--defaults", "--set", "ccl.worker_count=two"], "--set ccl.worker_count: 'two' is not valid"),
        (["--defaults", "--set", "training.backend=mpi"], "expected one of auto, ccl, gloo"),
        (["--defaults", "--config-file", "."], ". is a directory"),
        (["--defaults", "--config-file", "/proc/nowhere/c.yaml"], "cannot be written"),
        (["--default"], "unknown option --default; did you mean '--defaults'?"),
        (["shwo"], "no command 'shwo'; did you mean 'show'?"),
        (["validate"], "no cpulaunch.yaml found"),
        (["import"], "no file to import"),
        (
            ["import", "nowhere.yaml"],
            "accelerate's own file is ~/.cache/huggingface/accelerate/default_config.yaml",
        ),
    ],
)
def test_impossible_requests_are_errors(
    cpulaunch: Run, tmp_path: Path, arguments: list[str], error: str
) -> None:
    done = cpulaunch("config", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_defaults_warns_about_settings_that_cannot_run_here(cpulaunch: Run, tmp_path: Path) -> None:
    ranks = len(os.sched_getaffinity(0)) + 1000
    done = cpulaunch("config", "--defaults", "--set", f"hosts.nproc={ranks}")
    assert done.returncode == 0
    assert f"warning: this can't run from this machine: {ranks} ranks do not fit on" in done.stderr
    assert "--oversubscribe" in done.stderr
    assert "Written: cpulaunch.yaml" in done.stderr


# ---- show


def test_show_prints_yaml_with_the_same_settings(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "cpulaunch.yaml").write_text("env: {A: 'no'}\n")
    first = cpulaunch("config", "show", "--set", "output.log_dir=no", "--origin")
    (tmp_path / "again.yaml").write_text(first.stdout)
    assert cpulaunch("config", "validate", "again.yaml").returncode == 0
    second = cpulaunch("config", "show", "--config-file", "again.yaml")
    assert second.returncode == 0
    assert yaml.safe_load(first.stdout) == yaml.safe_load(second.stdout)
    assert yaml.safe_load(second.stdout)["output"]["log_dir"] == "no"


def test_show_prints_the_source_of_each_value(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "cpulaunch.yaml").write_text("cpulaunch: 1\nccl:\n  worker_count: 2\n")
    env = {"CPULAUNCH_LAUNCHER": "local", "FI_PROVIDER": "psm3"}
    done = cpulaunch("config", "show", "--origin", "--set", "output.tee=0", env=env)
    origins = {line.split("#")[0].strip(): line.split("# ")[-1] for line in done.stdout.splitlines()[1:]}
    assert origins["worker_count: 2"] == "cpulaunch.yaml:3"
    assert origins["launcher: local"] == "$CPULAUNCH_LAUNCHER"
    assert origins["provider: psm3"] == "$FI_PROVIDER"
    assert origins['tee: "0"'] == "--set output.tee"
    assert origins["strategy: scatter"] == "default"


def test_show_prints_the_number_of_instances_that_other_settings_imply(cpulaunch: Run) -> None:
    cores = ("config", "show", "--origin", "--cores-per-instance", "1")
    assert "  count: auto                             # --cores-per-instance\n" in cpulaunch(*cores).stdout
    ranks = cpulaunch("config", "show", "-n", "2", env={"CPULAUNCH_INSTANCES_COUNT": "3"})
    assert "  count: none\n" in ranks.stdout


# ---- validate


def validated(cpulaunch: Run, directory: Path, text: str) -> tuple[int, str]:
    (directory / "c.yaml").write_text(text)
    done = cpulaunch("config", "validate", "c.yaml")
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            f"hosts: {{nproc_per_node: {len(os.sched_getaffinity(0)) + 1000}}}",
            "this can't run from this machine",
        ),
        ("hosts: {hostfile: nowhere}", "this can't run from this machine: hostfile nowhere"),
        ("ccl: {worker_count: 1}\ntraining: {backend: gloo}", "ccl.worker_count (c.yaml:1): has no effect"),
        ("ccl: {interface: nowhere0}", "this machine has no interface nowhere0"),
        ("cpu: {threads: 1000}", "cpu.threads (c.yaml:1): 1000 threads per rank of"),
        ("watch: {heartbeat_timeout: 1}", "would count as lost"),
        ("env: {KMP_AFFINITY: compact}", "KMP_AFFINITY also pins"),
    ],
)
def test_validate_warns_about_valid_but_unwise_values(
    cpulaunch: Run, tmp_path: Path, text: str, warning: str
) -> None:
    code, message = validated(cpulaunch, tmp_path, text + "\n")
    assert code == 0
    assert "warning: " in message
    assert warning in message


def test_validate_shows_all_errors_in_a_file(cpulaunch: Run, tmp_path: Path) -> None:
    code, message = validated(
        cpulaunch,
        tmp_path,
        "cpulaunch: 1\nlancher: local\nccl:\n  worker_cout: 2\n  transport: sctp\n  transport: ofi\n"
        "watch: 3\nenv: {OMP_NUM_THREADS: two, KMP_AFFINITY: compact}\n",
    )
    assert code == 2
    lines = message.splitlines()
    errors = [line.removeprefix("cpulaunch: error: c.yaml:") for line in lines if "error: " in line]
    assert [error.partition(";")[0].partition(": expected")[0] for error in errors] == [
        "2: unknown key 'lancher'",
        "4: unknown key 'worker_cout' in 'ccl'",
        "5: 'sctp' is not valid for ccl.transport",
        "6: 'ccl.transport' is given twice, first at c.yaml:5",
        "7: 'watch' is a section",
        "8 OMP_NUM_THREADS: 'two' is not valid for cpu.threads",
    ]
    assert lines[-2] == "cpulaunch: apart from these errors:"
    assert "KMP_AFFINITY also pins" in lines[-1]


MANY = len(os.sched_getaffinity(0)) + 1000


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        (
            f"hosts: {{nproc: {MANY}}}\nmpi: {{path: nowhere}}\nlauncher: mpirun\n"
            "watch: {heartbeat_timeout: 1}\nenv: {KMP_AFFINITY: compact}",
            [f"{MANY} ranks do not fit", "found in nowhere", "KMP_AFFINITY also pins", "would count as lost"],
        ),
        ("hosts: {hostfile: nowhere, nproc_per_node: 5000, nnodes: 7}\ncpu: {cores: '9999'}",
         ["hostfile nowhere", "9999"]),
        (f"hosts: {{nproc: {MANY}, oversubscribe: true}}\nccl: {{interface: nowhere0}}", ["no interface nowhere0"]),
    ],
    ids=["each its own", "hosts that are not known", "one makes room for another"],
)  # fmt: skip
def test_validate_shows_everything_that_would_not_run_here(
    cpulaunch: Run, tmp_path: Path, text: str, warnings: list[str]
) -> None:
    (tmp_path / "a").write_text("localhost\n")
    code, message = validated(cpulaunch, tmp_path, text + "\n")
    assert code == 0
    lines = [line for line in message.splitlines() if "warning: " in line]
    for warning in warnings:
        assert sum(warning in line for line in lines) == 1, message
    assert len(lines) == len(warnings), message


def test_validate_reads_the_same_file_as_a_run(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "cpulaunch.yaml").write_text("launcher: local\noutput: {tee: 0-}\n")
    done = cpulaunch("config", "validate")
    assert done.returncode == 2
    assert "cpulaunch.yaml:2: '0-' is not valid for output.tee" in done.stderr


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_the_example_configurations_are_valid(cpulaunch: Run, path: Path) -> None:
    done = cpulaunch("config", "validate", path, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


# ---- import


def test_import_writes_a_valid_file_and_lists_skipped_keys(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb\n")
    (tmp_path / "old.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_machines: 2\nnum_processes: 2\n"
        "same_network: true\nuse_cpu: true\nmpirun_config: {mpirun_hostfile: hosts, mpirun_ccl: '1'}\n"
    )
    shown = cpulaunch("config", "import", "old.yaml")
    assert yaml.safe_load(shown.stdout)["hosts"] == {"hostfile": "hosts", "nnodes": 2, "nproc_per_node": 1}
    assert "old.yaml:5: same_network: true: not converted" in shown.stderr
    done = cpulaunch("config", "import", "old.yaml", "-o", "new.yaml")
    assert (done.returncode, done.stdout) == (0, "")
    assert "Written: new.yaml" in done.stderr
    assert (tmp_path / "new.yaml").read_text() == shown.stdout
    assert cpulaunch("config", "validate", "new.yaml").returncode == 0
    assert cpulaunch("config", "import", "old.yaml", "-o", "new.yaml").returncode == 2
    assert cpulaunch("config", "import", "old.yaml", "-o", "new.yaml", "--force").returncode == 0


def test_choices_left_to_the_script_are_not_shown_as_planned(cpulaunch: Run, tmp_path: Path) -> None:
    done = cpulaunch("config", "--defaults", "--set", "training.as_written=true")
    assert " · as written · " in done.stdout + done.stderr
    assert "precision bf16" not in done.stdout + done.stderr


def test_the_last_line_mentions_submit_if_it_can_be_used(cpulaunch: Run, tmp_path: Path) -> None:
    (sbatch := tmp_path / "sbatch").write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    submits = "cpulaunch submit --nodes 4 train.py"
    assert submits in cpulaunch("config", "--defaults", "--force", env=path).stderr
    inside = path | {"SLURM_JOB_ID": "12"}
    assert submits not in cpulaunch("config", "--defaults", "--force", env=inside).stderr
