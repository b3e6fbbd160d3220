"""`cpulaunch run --instances` with real programs, started directly and by the mpiexec of three MPIs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.command import REPOSITORY, Run, needs_two_cores
from support.jobs import box, outcome, outputs
from support.marks import repeat, usually_under

SHOW = """
import json, os, sys
names = ("CPULAUNCH_INSTANCE", "CPULAUNCH_INSTANCES", "OMP_NUM_THREADS", "GIVEN")
ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RUN_ID", "CPULAUNCH_JOB_RANK", "CPULAUNCH_BACKEND", "PMI_RANK", "OMPI_COMM_WORLD_RANK"}
print(json.dumps({"argv": sys.argv[1:], "cpus": sorted(os.sched_getaffinity(0)),
                  "env": {n: os.environ.get(n) for n in names}, "of_ranks": sorted(ours & os.environ.keys())}))
"""

# Instance 0 fails.  Instance 1 goes on until the log of events shows that failure.
FAIL = """
import os, pathlib, sys, time
if os.environ["CPULAUNCH_INSTANCE"] == "0":
    raise ValueError("no such luck")
while True:
    if any('"exit"' in path.read_text() for path in pathlib.Path().glob("runs/*/events.jsonl")):
        print("went on")
        break
    time.sleep(0.02)
"""

FIGURES = """
import os, cpulaunch
number = int(os.environ["CPULAUNCH_INSTANCE"])
mine = cpulaunch.shard([3, 5, 8, 13, 21])
print(f"{mine}")
for value in mine:
    cpulaunch.metric("latency", value, "ms")
print("CPULAUNCH_METRIC throughput=%d samples/s" % (100 + number))
"""

GROUP = """
import torch, torch.distributed as dist
dist.init_process_group({how})
sum = torch.ones(1)
dist.all_reduce(sum)
print(dist.get_rank(), dist.get_world_size(), sum.item())
"""


@pytest.fixture
def infer(tmp_path: Path) -> Path:
    path = tmp_path / "infer.py"
    path.write_text(SHOW)
    return path


@needs_two_cores
class TestEveryLauncher:
    @usually_under("local", "openmpi")
    def test_instances_get_their_number_but_no_variables_of_ranks(
        self, cpulaunch: Run, launcher_options, infer: Path
    ) -> None:
        # Stray variables in the user's environment must not make ranks of them.
        strays = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "29500"}
        said = ("--out=n{instance}", '{"part": {"number": {instance}}, "{instance}": "{}"}')
        done = cpulaunch(
            "run", "--instances", "2", *launcher_options, "--env", "GIVEN=x", infer, *said, env=strays
        )
        both = outputs(done)
        assert [r["argv"] for r in both] == [
            [f"--out=n{number}", f'{{"part": {{"number": {number}}}, "{number}": "{{}}"}}']
            for number in (0, 1)
        ]
        assert [r["env"]["CPULAUNCH_INSTANCE"] for r in both] == ["0", "1"]
        assert [r["env"]["CPULAUNCH_INSTANCES"] for r in both] == ["2", "2"]
        assert [(r["of_ranks"], r["env"]["GIVEN"]) for r in both] == [([], "x")] * 2
        assert not set(both[0]["cpus"]) & set(both[1]["cpus"])
        assert [len(r["cpus"]) for r in both] == [int(r["env"]["OMP_NUM_THREADS"]) for r in both]
        assert " 2 instances on this machine, " in done.stderr
        assert "no process group" in done.stderr

    @usually_under("local", "mpich")
    def test_the_failure_of_an_instance_does_not_end_the_others(
        self, cpulaunch: Run, launcher_options, marked, tmp_path: Path
    ) -> None:
        (tmp_path / "fail.py").write_text(FAIL)
        done = cpulaunch("run", "--instances", "2", *launcher_options, "fail.py", env=marked)
        assert done.returncode == 1
        assert done.stdout == "[1] went on\n"
        assert "others go on" not in done.stderr  # there is only one other instance
        title, lines = box(done.stderr)
        assert (title, lines[0]) == ("instance 0 on localhost failed first", "ValueError: no such luck")
        assert "cpulaunch: 1 other instance (1): exit 0" in done.stderr
        assert re.fullmatch(r"exit code 1 · log: runs/\S+/instance-0.log", lines[-1])
        assert [rank["status"] for rank in outcome(tmp_path)["ranks"]] == ["exit 1", "exit 0"]


@needs_two_cores
class TestOptions:
    def test_metrics_of_all_instances_are_combined(self, cpulaunch: Run, tmp_path: Path) -> None:
        (tmp_path / "figures.py").write_text(FIGURES)
        done = cpulaunch("run", "--instances", "2", "figures.py")
        assert done.returncode == 0, done.stderr
        assert {"[0] [3, 8, 21]", "[1] [5, 13]", "[1] CPULAUNCH_METRIC latency=13 ms"} <= {
            *done.stdout.splitlines()
        }
        assert [line for line in done.stderr.splitlines() if "values of" in line or "in all" in line] == [
            "cpulaunch: latency     median 8 ms, 99th percentile 20.68 ms (5 values of 2 instances, 3 to 21)",
            "cpulaunch: throughput  201 samples/s in all (2 instances, 100 to 101)",
        ]
        metrics = {metric["name"]: metric for metric in outcome(tmp_path)["metrics"]}
        assert metrics["throughput"]["total"] == 201
        latency = metrics["latency"]
        assert [latency[key] for key in ("total", "values", "median", "least", "most")] == [None, 5, 8, 3, 21]
        assert " · throughput 201 samples/s · latency 8 ms · figures.py" in cpulaunch("jobs").stdout

    def test_fail_fast_ends_the_others(self, cpulaunch: Run, marked, tmp_path: Path) -> None:
        (tmp_path / "fail.py").write_text(FAIL.replace("break", "time.sleep(300)"))
        done = cpulaunch("run", "--instances", "2", "--fail-fast", "fail.py", env=marked)
        assert done.returncode == 1
        assert " on localhost failed: " not in done.stderr
        assert "cpulaunch: 1 other instance (1): ended by launcher" in done.stderr

    def test_the_option_instance_runs_a_single_instance_on_its_cores(
        self, cpulaunch: Run, infer: Path
    ) -> None:
        both = outputs(cpulaunch("run", "--instances", "2", infer))
        done = cpulaunch("run", "--instances", "2", "--instance", "1", infer, "--part={instance}")
        alone = json.loads(done.stdout)
        assert (alone["cpus"], alone["env"]) == (both[1]["cpus"], both[1]["env"])
        assert alone["argv"] == ["--part=1"]
        assert " only instance 1 of 2 on this machine, " in done.stderr
        logs = {path.name for path in infer.parent.glob("runs/*/*-?.log")}
        assert logs == {"instance-0.log", "instance-1.log"}

    def test_with_each_every_instance_gets_a_line_of_arguments(
        self, cpulaunch: Run, infer: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "args.txt").write_text("# two parts\n--part 'a b' {instance}\n\n--part $x\n")
        both = outputs(cpulaunch("run", "--each", "args.txt", infer, "all-{instance}"))
        assert [r["argv"] for r in both] == [["all-0", "--part", "a b", "0"], ["all-1", "--part", "$x"]]

    @pytest.mark.parametrize("how", ["--instances 2", "--each args.txt"])
    def test_a_plan_for_slurm_shows_instances(self, cpulaunch: Run, infer: Path, how: str) -> None:
        (infer.parent / "args.txt").write_text("--part a\n--part b\n")
        described = ("--lscpu", REPOSITORY / "tests/plan/2x28.lscpu")
        done = cpulaunch("submit", "--nodes", "2", *described, "--dry-run", *how.split(), infer)
        assert "2 instances on 2 hosts (node[1-2]), 56 threads each · no process group, " in done.stderr
        assert f"run {how.replace(' ', '=')} {infer}" in done.stdout

    def test_messages_after_the_start_say_instance_instead_of_rank(
        self, cpulaunch: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "fail.py").write_text("import os; print('CPULAUNCH_METRIC x'); os._exit(3)")
        done = cpulaunch("run", "--instances", "2", "--fail-fast", "--instance", "1", "fail.py")
        assert "localhost: instance 1 printed a metric that can't be read: expected " in done.stderr
        assert box(done.stderr)[0] == "instance 1 on localhost failed first"
        assert "1 host, 1 instance" in (jobs := cpulaunch("jobs").stdout)
        assert "failed: instance 1 on localhost ended with exit code 3" in jobs
        assert cpulaunch("logs", "--instance", "1").stdout == "CPULAUNCH_METRIC x\n"
        wrong = cpulaunch("logs", "--instance", "0")
        assert (wrong.returncode, "has no instance 0" in wrong.stderr) == (2, True)
        assert "it has instance 1" in wrong.stderr

    def test_arguments_of_ranks_are_not_changed(self, cpulaunch: Run, infer: Path) -> None:
        rank = json.loads(cpulaunch("run", "-n", "1", infer, "{instance}").stdout)
        assert rank["argv"] == ["{instance}"]

    def test_options_of_run_cpu_keep_their_meaning(self, cpulaunch: Run, infer: Path) -> None:
        both = outputs(cpulaunch("run", "--ninstances", "2", "--ncores_per_instance=1", infer))
        assert [len(r["cpus"]) for r in both] == [1, 1]
        done = cpulaunch("run", "--throughput_mode", "--node_id", "0", infer)
        assert json.loads(done.stdout)["env"]["CPULAUNCH_INSTANCES"] == "1"

    def test_programs_that_are_not_python_run_as_instances(self, cpulaunch: Run) -> None:
        done = cpulaunch(
            "run", "--instances", "2", "--no-python", "sh", "-c", "echo $CPULAUNCH_INSTANCE $0", "n{instance}"
        )
        assert sorted(done.stdout.splitlines()) == ["[0] 0 n0", "[1] 1 n1"]

    def test_the_pasted_shell_form_starts_the_same_instances(
        self, cpulaunch: Run, infer: Path, tmp_path: Path
    ) -> None:
        lines = cpulaunch("run", "--instances", "2", "--dry-run", "--format", "shell", infer, "{instance}")
        done = subprocess.run(
            ["bash", "-c", lines.stdout], capture_output=True, text=True, cwd=tmp_path, timeout=60
        )
        assert done.returncode == 0, done.stderr
        seen = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
        assert sorted(json.loads(line)["argv"][0] for line in seen) == ["0", "1"]

    def test_instances_can_be_set_in_the_configuration_file(
        self, cpulaunch: Run, infer: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "cpulaunch.yaml").write_text(
            "cpulaunch: 1\nhosts: {nproc_per_node: 1}\ninstances: {count: 2, cores_per_instance: 1}\n"
        )
        done = cpulaunch("run", infer)
        assert (done.returncode, "contradicts" in done.stderr) == (2, True)
        (tmp_path / "cpulaunch.yaml").write_text(
            "cpulaunch: 1\ninstances: {count: 2, cores_per_instance: 1}\n"
        )
        assert len(outputs(cpulaunch("run", infer))) == 2


@pytest.mark.slow
class TestAScriptThatMakesAGroup:
    @pytest.mark.parametrize("how", [repeat(""), repeat("'gloo'"), "backend='nccl', init_method='env://'"])
    def test_a_process_group_of_an_instance_has_no_other_member(
        self, cpulaunch: Run, tmp_path: Path, how: str
    ) -> None:
        (tmp_path / "group.py").write_text(GROUP.format(how=how))
        done = cpulaunch("run", "--instances", "2", "group.py")
        assert sorted(done.stdout.splitlines()) == ["[0] 0 1 1.0", "[1] 0 1 1.0"], done.stderr
        (line,) = [line for line in done.stderr.splitlines() if "independent programs" in line]
        assert "the process group of each has no other member" in line

    def test_a_script_can_make_a_group_of_several_instances(self, cpulaunch: Run, tmp_path: Path) -> None:
        how = "'gloo', init_method=f'file://{__file__}.store', rank=int(__import__('os').environ['CPULAUNCH_INSTANCE']), world_size=2"
        (tmp_path / "group.py").write_text(GROUP.replace("{how}", how))
        done = cpulaunch("run", "--instances", "2", "group.py")
        assert sorted(done.stdout.splitlines()) == ["[0] 0 2 2.0", "[1] 1 2 2.0"], done.stderr
        assert "independent programs" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        ("--instances 4096", "4096 instances do not fit on", "Ask for fewer instances (--instances, or lines of --each)"),
        ("--instances 0", "--instances: '0' is not valid for instances.count", None),
        ("--instances 2 -n 2", "hosts.nproc (-n) contradicts instances.count (--instances)", "leave it out"),
        ("--instances 2 --nnodes 1:2 --hosts a,b", "hosts.nnodes (--nnodes) contradicts", "--nnodes N"),
        ("--instance 1", "instances.only (--instance): the job has no instances", "--instances N"),
        ("--instances 1 --instance 1", "there is no instance 1", "the only instance is 0"),
        ("--fail-fast", "instances.fail_fast (--fail-fast): the job has no instances", "--instances N"),
        ("--each=", "--each: the file's name is empty", "a line of arguments for each instance"),
        ("--each nowhere", "--each nowhere: cannot be read: No such file", "a line of arguments for each instance"),
        ("--each empty", "--each empty: has no line of arguments", None),
        ("--each broken", "broken:2: no closing quotation", "as a shell would"),
        ("--each bytes", "--each bytes:1: byte 0xff is not UTF-8", None),
        ("--each null", "null:1: an argument can't have a null character", None),
        ("--each two --instances 1", "--each has 2 lines, but the job has 1 instance", "starts one for each line"),
        ("--each two --instances none", "the job has no instances, as instances.count (--instances) is none", None),
    ],
)  # fmt: skip
def test_invalid_instances_are_refused(
    cpulaunch: Run, infer: Path, tmp_path: Path, arguments: str, said: str, hint: str | None
) -> None:
    (tmp_path / "empty").write_text("# nothing\n\n")
    (tmp_path / "broken").write_text("a\n'b\n")
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    (tmp_path / "null").write_bytes(b"a\0b\n")
    (tmp_path / "two").write_text("a\nb\n")
    done = cpulaunch("run", *arguments.split(), infer)
    assert done.returncode == 2
    assert said in done.stderr
    assert hint is None or hint in done.stderr.partition("hint: ")[2]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_shows_the_arguments_of_each_instance(cpulaunch: Run, infer: Path, tmp_path: Path) -> None:
    (tmp_path / "each").write_text("--out {instance}.csv\n'b c'\n")
    dry = ("run", "--each", "each", "--lscpu", REPOSITORY / "tests/plan/2x28.lscpu", "--dry-run")
    lines = cpulaunch(*dry, infer, "part-{instance}").stdout.splitlines()
    assert {"  instance 0: part-0 --out 0.csv", "  instance 1: part-1 'b c'"} <= set(lines)
    assert {"  CPULAUNCH_INSTANCE: its number, from 0", "  CPULAUNCH_INSTANCES=2"} <= set(lines)
    assert any(line.endswith(", which fills in the arguments") for line in lines if "Command" in line)
    lines = cpulaunch(*dry[:-1], "--instance", "1", "--dry-run", infer).stdout.splitlines()
    assert "  instance 1: 'b c'" in lines
    assert not [line for line in lines if "instance 0" in line]


def test_a_file_of_arguments_may_begin_with_a_byte_order_mark(
    cpulaunch: Run, infer: Path, tmp_path: Path
) -> None:
    (tmp_path / "each").write_bytes(b"\xef\xbb\xbf# first\n--a 1 # 2\n")
    lines = cpulaunch("run", "--each", "each", "--dry-run", infer).stdout.splitlines()
    assert "  instance 0: --a 1 '#' 2" in lines


def test_topology_accepts_the_option_each(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "each").write_text("a\nb\nc\n")
    drawn = ("topology", "--lscpu", REPOSITORY / "tests/plan/2x28.lscpu")
    assert cpulaunch(*drawn, "--each", "each").stdout == cpulaunch(*drawn, "--instances", "3").stdout
    refused = cpulaunch(*drawn, "--each", "each", "--instances", "none")
    assert (refused.returncode, "--each: the job has no instances" in refused.stderr) == (2, True)


@needs_two_cores
def test_an_instance_that_hangs_is_reported_and_ended(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(
        "import os, pathlib, time, cpulaunch\n"
        "print('ready', flush=True)\n"
        "while os.environ['CPULAUNCH_INSTANCE'] == '1':\n"
        "    time.sleep(600)\n"
        "while not any('\"exit\"' in path.read_text() for path in pathlib.Path().glob('runs/*/events.jsonl')):\n"
        "    cpulaunch.metric('latency', 1, 'ms')\n"
        "    time.sleep(0.1)\n"
    )
    stalls = ("--stall-timeout", "4", "--stall-action", "abort")
    done = cpulaunch("run", "--instances", "2", *stalls, "hang.py", cwd=tmp_path)
    assert done.returncode == 4
    title, lines = box(done.stderr)
    assert re.fullmatch(r"no progress for \d+ s: instance 1 on localhost is at hang.py:4 <module>", title)
    assert lines[0] == "Who is where:"
    end = r"no progress for \d+ s: it is at hang.py:4 <module>"
    assert re.search(rf"^cpulaunch: instance 1 on localhost was ended: {end}$", done.stderr, re.M)
    assert [rank["status"] for rank in outcome(tmp_path)["ranks"]] == ["exit 0", "ended by launcher"]
