"""Options of torchrun, accelerate and MPIs work, are ignored with a message, or are refused."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.command import REPOSITORY, TIMEOUT, Run
from support.marks import slow

from cpulaunch.cli import habits
from cpulaunch.cli.main import main
from cpulaunch.cli.run.command import run_parser

OPTIONS_OF = """
import json
from {module} import {function}
print(json.dumps([name for action in {function}()._actions for name in action.option_strings]))
"""


def argparse_options(module: str, function: str) -> list[str]:
    """All options of a command, listed by another process, because importing torch is slow."""
    source = OPTIONS_OF.format(module=module, function=function)
    asked = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=TIMEOUT)
    options: list[str] = json.loads(asked.stdout.splitlines()[-1])
    return options


def hydra_options(mpiexec: Path) -> list[str]:
    helped = subprocess.run([mpiexec, "--help"], capture_output=True, text=True, timeout=TIMEOUT).stdout
    found = re.findall(r"^ +(-[\w-]+(?:/-[\w-]+)*)", helped, re.M)
    return [option for group in found for option in group.split("/")]


def mpichs_options() -> list[str]:
    if directory := os.environ.get("CPULAUNCH_TEST_MPICH"):
        return hydra_options(Path(directory, "mpiexec.hydra"))
    pytest.skip("CPULAUNCH_TEST_MPICH is not set: scripts/test.sh sets it")


def ipexruns_options() -> list[str]:
    """The options are found in the source, because IPEX can't be imported with this torch."""
    directory = os.environ.get("CPULAUNCH_TEST_INTEL")
    if not directory:
        pytest.skip("CPULAUNCH_TEST_INTEL is not set: scripts/test.sh sets it")
    package = "lib/python3*/site-packages/intel_extension_for_pytorch/cpu"
    files = (f"{package}/launch/launch*.py", f"{package}/auto_ipex.py")
    source = "".join(file.read_text() for names in files for file in Path(directory).parent.glob(names))
    return re.findall(r'^ +"(--[\w-]+)",$', source, re.M)


# Options of earlier versions of accelerate.
OLDER = {"cpu", "use-cpu", "use-xpu", "ipex", "mpirun-ccl", "multi-cpu", "same-network"}

PROGRAMS = {
    "torchrun": lambda: argparse_options("torch.distributed.run", "get_args_parser"),
    "accelerate": lambda: argparse_options("accelerate.commands.launch", "launch_command_parser"),
    "Intel MPI": lambda: hydra_options(Path(sys.prefix, "bin", "mpiexec.hydra")),
    "MPICH": mpichs_options,
    "ipexrun": ipexruns_options,
    "run_cpu": lambda: re.findall(
        r'^ +"(--[\w-]+)",$',
        (Path(find_spec("torch").submodule_search_locations[0]) / "backends/xeon/run_cpu.py").read_text(),
        re.M,
    ),
}


OF_OTHER_ENVIRONMENTS = ("MPICH", "ipexrun")


@pytest.mark.parametrize(
    "program", [slow(name) if name in OF_OTHER_ENVIRONMENTS else name for name in PROGRAMS]
)
def test_the_table_has_only_options_that_the_program_has(program: str) -> None:
    options = {option.lstrip("-").replace("_", "-") for option in PROGRAMS[program]()}
    assert len(options) >= 20
    named = [
        name.lstrip("-")
        for row in habits.TABLE
        if row.programs.split(", ") == [program]
        for name in row.names.split()
    ]
    assert {name for name in named if name not in options} <= OLDER


def test_the_table_of_refused_options_has_no_option_of_cpulaunch() -> None:
    """The parser would accept such an option before it could be refused."""
    known = run_parser()._option_string_actions
    refused = [name for row in habits.TABLE if type(row) is habits.Refused for name in row.names.split()]
    assert [name for name in refused if name in known] == []
    assert len(refused) == len(set(refused))


def test_the_page_is_generated_from_the_tables() -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "coming_from_page.py"))
    page = (REPOSITORY / "docs" / "coming-from.md").read_text()
    assert script["page"]() == page, "run scripts/coming_from_page.py"


def settings_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """The settings in the plan of a dry run that come from the command line."""
    assert main(["run", *arguments, "--dry-run", "--format", "json", "train.py"]) == 0
    plan = json.loads(capsys.readouterr().out)
    return {row["key"]: row["value"] for row in plan["settings"] if row["origin"].startswith("-")}


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--num_processes 1", "hosts.nproc", 1),
        ("--np 1", "hosts.nproc", 1),
        ("--num_machines 1", "hosts.nnodes", 1),
        ("--nnodes 1:1", "hosts.nnodes", 1),
        ("-N 1", "hosts.nproc_per_node", 1),
        ("--pernode", "hosts.nproc_per_node", 1),
        ("-hosts localhost", "hosts.list", "localhost"),
        ("--main_process_port 1234", "hosts.master_port", 1234),
        ("--mixed_precision no", "training.precision", "fp32"),
        ("--mixed_precision bf16", "training.precision", "bf16"),
        ("--dynamo_backend inductor", "training.compile", True),
        ("--numa-binding node", "cpu.bind_numa", True),
        ("-genv A 1 -env B x=y", "env", {"A": "1", "B": "x=y"}),
        ("-genv A=1 -env B=x=y", "env", {"A": "1", "B": "x=y"}),
        ("-x A=1", "env", {"A": "1"}),
        ("--node_id 0", "cpu.numa_nodes", "0"),
        ("--use_default_allocator", "cpu.allocator", "default"),
        ("--disable-iomp", "cpu.openmp", "default"),
        ("--ninstances 1", "instances.count", 1),
        ("--throughput_mode", "instances.count", "auto"),
        ("--latency_mode --lscpu FILE", "instances.cores_per_instance", 4),
        ("--ninstances 1 --rank -1", "instances.only", "all"),
        ("--ninstances 1 --multi_instance", "instances.count", 1),
        (
            "--benchmark",
            "env",
            {
                "MALLOC_CONF": "oversize_threshold:1,background_thread:false,"
                "metadata_thp:always,dirty_decay_ms:-1,muzzy_decay_ms:-1"
            },
        ),
        ("--ninstances 1 --instance_idx 0", "instances.only", 0),
        ("--ninstances 1 --skip_cross_node_cores", "cpu.bind_numa", True),
    ],
)
def test_an_option_of_another_launcher_sets_a_setting(
    script: None, capsys: pytest.CaptureFixture[str], arguments: str, key: str, value: object
) -> None:
    arguments = arguments.replace("FILE", str(REPOSITORY / "tests/plan/2x28.lscpu"))
    given = settings_of(arguments.split(), capsys)
    if key == "env":
        assert main(["run", *arguments.split(), "--dry-run", "--format", "json", "train.py"]) == 0
        env = json.loads(capsys.readouterr().out)["env"]
        assert {name: env[name] for name in value} == value  # type: ignore[attr-defined]
    else:
        assert given[key] == value


def test_placeholder_values_of_run_cpu_and_ipexrun_count_as_not_given(
    script: None, capsys: pytest.CaptureFixture[str]
) -> None:
    unset = "--ninstances -1 --ncores_per_instance=-1 --node_id -1 --ninstances 0 --ncores-per-instance 0"
    assert settings_of(unset.split(), capsys) == {}
    given = settings_of(["--ninstances", "1", *unset.split()], capsys)
    assert given == {"instances.count": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        "--np 2 --np 1",
        "--np 1 --ntasks 1",
        "--skip_cross_node_cores --bind-numa-node",
        "--enable_tcmalloc --allocator default",
    ],
)
def test_equal_or_repeated_options_do_not_contradict_each_other(
    script: None, capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    assert settings_of(arguments.split(), capsys)


@pytest.mark.parametrize("option", ["-hostfile", "--mpirun_hostfile"])
def test_hostfile_options_of_other_launchers_work(
    script: None, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    arguments = [
        option,
        "hosts",
        "--main_process_ip",
        "a",
        "--lscpu",
        str(REPOSITORY / "tests/plan/2x28.lscpu"),
    ]
    given = settings_of(arguments, capsys)
    assert (given["hosts.hostfile"], given["hosts.master_addr"]) == ("hosts", "a")


@pytest.mark.parametrize("options", ["-m --nproc_per_node 1", "--module -genv A 1 -n 1", "-n 1 -m"])
def test_options_may_follow_m_as_with_torchrun(
    script: None, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    assert main(["run", "--dry-run", "--format", "json", *options.split(), "json.tool", "-n", "-m"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["program"][1:] == ["-m", "json.tool", "-n", "-m"]
    assert plan["world_size"] == 1


def test_with_wdir_the_script_is_looked_up_in_that_directory(
    script: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("-wdir", "--wdir"):
        assert main(["run", option, "inside", "--dry-run", "--format", "json", "other.py"]) == 0
        assert json.loads(capsys.readouterr().out)["program"][1:] == ["other.py"]
    assert main(["run", "-wdir", "inside", "train.py"]) == 2
    assert f"train.py: no such script in {Path.cwd() / 'inside'}" in capsys.readouterr().err
    assert main(["run", "-wdir", "nowhere", "train.py"]) == 2
    assert "--wdir nowhere: no such directory" in capsys.readouterr().err


def test_ranks_really_run_in_wdir(cpulaunch: Run, show: Path, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "where.py").write_text("import os; print(os.getcwd(), os.environ['A'])")
    done = cpulaunch("run", "-n", "1", "-wdir", "inside", "-genv", "A", "-1", "where.py")
    assert done.stdout == f"{tmp_path / 'inside'} -1\n"
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize(
    "arguments",
    ["--use_cpu", "-l", "--role trainer", "-prepend-rank", "--log-file-prefix run --ninstances 1",
     "--multi_instance --ninstances 1"],
)  # fmt: skip
def test_a_meaningless_option_is_ignored_with_a_message_of_one_line(
    script: None, capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    assert main(["run", *arguments.split(), "--dry-run", "--format", "shell", "train.py"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    option = arguments.split()[0].replace("_", "-")
    assert len(said) == 1
    assert said[0].startswith(f"cpulaunch: {option} is ignored: ")


def test_options_for_several_hosts_are_ignored_on_one_host(
    script: None, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = ["--dry-run", "--format", "shell", "train.py"]
    rendezvous = ["--rdzv_id", "7", "--rdzv_backend=c10d", "--rdzv_endpoint", "localhost:0"]
    assert main(["run", "--nnodes", "1", *rendezvous, "--node_rank", "0", *dry]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    names = "--rdzv-id, --rdzv-backend, --rdzv-endpoint, --node-rank 0"
    assert line == f"cpulaunch: {names} are ignored: the job is on one host"
    assert main(["run", "--machine_rank", "0", *dry]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "cpulaunch: --machine-rank 0 is ignored: the job is on one host"
    lscpu = ["--lscpu", str(REPOSITORY / "tests/plan/2x28.lscpu")]
    assert main(["run", "-f", "hosts", *lscpu, "--node_rank", "0", *dry]) == 2
    assert "--node-rank 0: one `cpulaunch run` starts all hosts" in capsys.readouterr().err


def test_a_range_of_hosts_with_equal_limits_is_a_number(
    script: None, capsys: pytest.CaptureFixture[str]
) -> None:
    lscpu = ["--lscpu", str(REPOSITORY / "tests/plan/2x28.lscpu")]
    assert settings_of(["-f", "hosts", "--nnodes", "2:2", *lscpu], capsys)["hosts.nnodes"] == 2


def test_torchruns_options_for_restarts_work(script: None, capsys: pytest.CaptureFixture[str]) -> None:
    lscpu = ["--lscpu", str(REPOSITORY / "tests/plan/2x28.lscpu")]
    elastic = ["-f", "hosts", "--nnodes", "1:2", "--max_restarts", "3"]
    found = settings_of([*elastic, *lscpu], capsys)
    assert (found["hosts.nnodes"], found["watch.max_restarts"]) == ("1:2", 3)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ("--nnodes 2 --rdzv-backend c10d", "--rdzv-backend: no rendezvous service is needed", "-f HOSTFILE"),
        (
            "--nnodes 2 --rdzv-id 7 --rdzv-backend c10d",
            "--rdzv-id, --rdzv-backend: no rendezvous",
            "-f HOSTFILE",
        ),
        (
            "--node_rank 1",
            "--node-rank 1: one `cpulaunch run` starts all hosts",
            "start one `cpulaunch run` for all hosts",
        ),
        (
            "--machine_rank 1",
            "--machine-rank 1: one `cpulaunch run`",
            "start one `cpulaunch run` for all hosts",
        ),
        ("--nnodes 2 --node_rank 0", "--node-rank 0: one `cpulaunch run` starts all hosts", "--hosts a,b"),
        ("--bind-to core", "--bind-to: cpulaunch itself binds", "--dry-run shows"),
        ("-t 3", "-t: each rank's output is in the file rank-N.log", "--tee RANKS"),
        (
            "--nproc-per-node cpu",
            "--nproc-per-node cpu: the number of ranks doesn't depend on devices",
            "one rank per NUMA",
        ),
        ("--tee 0:3", "--tee 0:3: expected ranks, whose stdout and stderr", "leave it out"),
        ("--nnodes 3:4", "hosts.nnodes (--nnodes): 3 hosts, but only 1 named", "--hosts a,b"),
        ("--stall-action restart", "watch.stall_action (--stall-action): no restart", "--max-restarts N"),
        (
            "--stall-action restart --max-restarts 1 --restart-on never",
            "watch.stall_action (--stall-action): watch.restart_on (--restart-on) is never, which forbids restarts",
            "--stall-action abort",
        ),
        (
            "--stall-action abort --stall-timeout 0",
            "watch.stall_action (--stall-action): watch.stall_timeout (--stall-timeout) is 0",
            "--stall-timeout auto",
        ),
        ("--mixed_precision fp16", "--mixed-precision fp16: CPUs train in bf16 or fp32", "bf16"),
        ("--dynamo_backend eager", "--dynamo-backend eager: models are compiled with", "--compile"),
        ("--numa-binding socket", "--numa-binding socket: ranks can be kept", "--bind-numa"),
        ("--use_fsdp", "--use-fsdp: the script has to set this up itself", "in the script"),
        (
            "--ninstances 2 --latency_mode",
            "--latency-mode contradicts --ninstances 2",
            "as many with 4 cores",
        ),
        (
            "--throughput_mode --instances 2",
            "--throughput-mode contradicts --instances 2",
            "one per NUMA node",
        ),
        (
            "--throughput-mode --ncores_per_instance 2",
            "--throughput-mode contradicts --ncores-per-instance 2",
            "as many as fit",
        ),
        ("--latency-mode --throughput-mode", "--latency-mode contradicts --throughput-mode", "leave out one"),
        (
            "--enable_tcmalloc --enable_jemalloc",
            "--enable-tcmalloc contradicts --enable-jemalloc",
            "both mean cpu.allocator",
        ),
        ("--np 2 --ntasks 3", "--np 2 contradicts --ntasks 3", "both mean hosts.nproc"),
        (
            "--ninstances 2 --instance_idx 0,1",
            "--instance-idx 0,1: cpulaunch starts one instance, or all",
            "a job for each instance",
        ),
        ("--auto_ipex", "--auto-ipex: the script runs unchanged, while ipexrun", "call ipex.optimize in the"),
        ("--mca btl tcp", "--mca: it is an option of mpiexec", "--mpi-args"),
    ],
)
def test_the_error_of_a_refused_option_names_its_replacement(
    script: None, capsys: pytest.CaptureFixture[str], arguments: str, error: str, hint: str
) -> None:
    assert main(["run", *arguments.split(), "train.py"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith(f"cpulaunch: error: {error}")
    assert said[1].startswith("cpulaunch: hint: ")
    assert hint in said[1]


@pytest.mark.parametrize(
    ("option", "meant"),
    [("--hostfle", "--hostfile"), ("--nproc-pernode", "--nproc-per-node"), ("--precison", "--precision"),
     ("--presicion", "--precision"), ("--cpuu", None), ("--lauchner", "--launcher"),
     ("--logdir", "--log-dir"), ("--rule", None), ("--beep", None), ("--cpus", None), ("--begin-method", None)],
)  # fmt: skip
def test_only_a_close_option_is_suggested(
    script: None, capsys: pytest.CaptureFixture[str], option: str, meant: str | None
) -> None:
    assert main(["run", option, "x", "train.py"]) == 2
    expected = f"unknown option {option}" + (f"; did you mean {meant!r}?" if meant else "")
    assert capsys.readouterr().err.splitlines()[0] == f"cpulaunch: error: {expected}"


def test_a_configuration_file_of_accelerate_is_recognized(
    script: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my a.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\n")
    assert main(["run", "--config_file", "my a.yaml", "train.py"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "cpulaunch: error: my a.yaml: a configuration of accelerate, not of cpulaunch"
    assert hint == "cpulaunch: hint: `cpulaunch config import 'my a.yaml' -o cpulaunch.yaml` converts it"


def test_a_host_that_is_listed_twice_is_an_error(script: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--hosts", "localhost,localhost", "train.py"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "cpulaunch: error: --hosts: localhost is named twice, as hosts 1 and 2"
    assert hint == "cpulaunch: hint: say how many ranks it takes: localhost:2"
