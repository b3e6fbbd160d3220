"""``cpulaunch submit --to kubernetes``: the job that its options produce, and its calls of kubectl."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from queues.kubernetes.fields import problems
from support.command import REPOSITORY

from cpulaunch.cli.main import main
from cpulaunch.queues.kubernetes.pods import MAX_FILES

BASE = ["submit", "--to", "kubernetes", "--image", "train:1"]
TRAINJOB = ["submit", "--to", "trainjob", "--image", "train:1"]

KUBECTL = """#!/bin/sh
# Records its arguments and input in the file NOTES, and refuses to create objects of the kind FAILS.
# Each call of `get pods` prints the next line of the file PODS; the last line is repeated.
case "$1 $2" in
  "config current-context") echo "the-cluster"; exit;;
  "get pods") head -n 1 "$PODS"; sed -i '1{$!d}' "$PODS"; exit;;
  "logs -f") echo "epoch 1"; exit;;
  get*) [ -e "$PODS.deleted" ] && { echo 'Error: mpijobs "train" not found' >&2; exit 1; }; echo '{}'; exit;;
esac
text=$(cat)
printf '%s\\n' "$*" "$text" >>"$NOTES"
case $text in *"kind: ${FAILS:-nothing}"*) echo "error: $SAYS" >&2; exit 1;; esac
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("CPULAUNCH_", "CCL_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("import torch\n")
    return tmp_path


@pytest.fixture
def kubectl(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a fake kubectl; return the file in which it records its calls."""
    (here / "bin").mkdir()
    (program := here / "bin" / "kubectl").write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(here / "notes"))
    return here / "notes"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The MPIJob that a dry run prints, and the files that it mounts."""
    assert main([*BASE, "--dry-run", *words]) == 0
    job, *maps = yaml.safe_load_all(capsys.readouterr().out)
    return job, maps[0]["data"] if maps else {}


def command(job: dict[str, Any]) -> list[str]:
    (container,) = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    return container["command"]


@pytest.mark.parametrize(
    ("typed", "runs", "files"),
    [
        (
            "-ppn 2 --threads 1 train.py --lr 3 --cpu 4",
            "-ppn 2 --threads=1 /etc/cpulaunch/train.py --lr 3 --cpu 4",
            ["train.py"],
        ),
        ("--nodes 2 /app/train.py x", "/app/train.py x", []),
        ("-m train x", "-m train x", []),
        ("--no-python ./prog x", "--no-python ./prog x", []),
    ],
)
def test_the_launcher_runs_the_given_command(
    typed: str, runs: str, files: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, maps = printed(capsys, *(["--job-name", "j"] if "./prog" in typed else []), *typed.split())
    assert command(job) == ["cpulaunch", "run", *runs.split()]
    assert list(maps) == files


@pytest.mark.parametrize(
    ("typed", "workers", "slots", "implementation"),
    [
        ("", 1, None, "Intel"),
        ("--nodes 4 -ppn 2 --mpi mpich", 4, 2, "MPICH"),
        ("-N 3 -n 6 --mpi openmpi", 3, 2, "OpenMPI"),
        ("--nnodes 2:4 --max-restarts 1 --mpi intel", 4, None, "Intel"),
    ],
)
def test_options_set_workers_slots_and_mpi(
    typed: str,
    workers: int,
    slots: int | None,
    implementation: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job, _ = printed(capsys, *typed.split(), "train.py")
    spec = job["spec"]
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == workers
    assert (spec.get("slotsPerWorker"), spec["mpiImplementation"]) == (slots, implementation)


def test_settings_from_yaml_and_environment_are_passed_to_the_job(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "cpulaunch.yaml").write_text("training:\n  precision: fp32\n")
    monkeypatch.setenv("CPULAUNCH_TRAINING_BACKEND", "gloo")
    monkeypatch.setenv("CCL_WORKER_COUNT", "3")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    job, files = printed(capsys, "--secret", "tokens", "-x", "HF_TOKEN", "train.py")
    assert command(job)[2:] == [
        "--config-file",
        "/etc/cpulaunch/cpulaunch.yaml",
        "-x",
        "HF_TOKEN",
        "/etc/cpulaunch/train.py",
    ]
    assert files["cpulaunch.yaml"] == "training:\n  precision: fp32\n"
    (container,) = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    assert container["env"] == [
        {"name": "CCL_WORKER_COUNT", "value": "3"},
        {"name": "CPULAUNCH_TRAINING_BACKEND", "value": "gloo"},
    ]
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    assert "hunter2" not in str(job)


def test_a_job_is_named_after_its_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "Train_my-BERT.v2.py").touch()
    names = [printed(capsys, "Train_my-BERT.v2.py")[0]["metadata"]["name"] for _ in range(2)]
    assert all(re.fullmatch("train-my-bert-v2-[0-9a-f]{6}", name) for name in names)
    assert names[0] != names[1]
    job, _ = printed(capsys, "--job-name", "bert", "Train_my-BERT.v2.py")
    assert job["metadata"] == {"name": "bert"}


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("submit --to kubernetes train.py", "--image is missing"),
        ("--cpu 16 train.py", "--cpu without --memory"),
        ("--memory 64Gi train.py", "--memory without --cpu"),
        ("--cpu 1.5 --memory 64Gi train.py", "--cpu '1.5' is not a number of whole CPUs"),
        ("--cpu 16 --memory 64Gi -ppn 40 train.py", "40 ranks on each worker, and --cpu 16 gives it 16 CPUs"),
        ("--cpu 16 --memory 64Gi --nodes 2 -n 34 train.py", "hosts.nproc (-n): 17 ranks on each worker"),
        ("--cpu 4 --memory 64Gi -ppn 2 --cores-per-rank 3 train.py", "2 ranks of 3 cores on each worker"),
        (
            "--cpu 4 --memory 64Gi --instances 5 train.py",
            "instances.count (--instances): 5 instances on each",
        ),
        ("--cpu 16 --memory 64GB train.py", "--memory '64GB' is not a quantity"),
        ("--cpu 16 --memory 64 train.py", "--memory 64 is too small: 64 bytes"),
        ("--nodes 0 train.py", "--nodes '0' is not a number of workers"),
        ("--nodes 4 -n 6 train.py", "6 ranks can't be divided evenly over 4 workers"),
        ("--job-name My_Job train.py", "'My_Job' is no valid name of a job"),
        ("--patch gone.yaml train.py", "--patch gone.yaml: cannot be read: No such file"),
        ("--patch train.py train.py", "--patch train.py: not a mapping"),
        ("--volume data train.py", "--volume 'data' is not like CLAIM:/PATH"),
        ("--volume data:/d --volume other:/d train.py", "--volume other:/d: data is mounted at /d"),
        ("--volume data:/usr/ train.py", "--volume data:/usr/: it would hide the image's /usr"),
        ("--volume data:/dev/shm/ train.py", "cpulaunch's own volume is mounted at /dev/shm"),
        ("--nodes 2 --nnodes 4 train.py", "hosts.nnodes (--nnodes): 4 of 2 workers"),
        ("--time 2:00:00 train.py", "--time is for --to slurm"),
        ("--hosts a,b train.py", "the operator selects the hosts"),
        ("--launcher slurm train.py", "slurm can't start ranks on the workers"),
        ("gone.py", "gone.py: no such script here"),
        ("sub", "sub: is a directory"),
        ("latin.py", "latin.py: not UTF-8 text"),
        ("big.py", "big.py: 1,048,577 bytes are too many for a ConfigMap; at most 1,048,576 fit"),
        ("whole.py", "whole.py: 1,048,584 bytes are too many for a ConfigMap"),  # the size includes its name
        ("4.py", "'4-"),
        ("", "no script to run"),
        ("submit --image train:1 train.py", "--image is for --to kubernetes, and this job is for slurm"),
    ],
)
def test_an_impossible_job_is_an_error_with_a_hint(
    typed: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "sub").mkdir()
    (here / "latin.py").write_bytes(b"# \xe4\n")
    (here / "big.py").write_text("#" * (MAX_FILES + 1))
    (here / "whole.py").write_text("#" * MAX_FILES)
    (here / "4.py").touch()
    words = shlex.split(typed)
    assert main(words if typed.startswith("submit") else [*BASE, "--dry-run", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "hint: " in error


def test_kubectl_creates_the_job_and_then_its_files(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, "--namespace", "ml", "-J", "train", "--output", "job.yaml", "train.py"]) == 0
    first, second = kubectl.read_text().split("create -f -\n")[1:]
    assert yaml.safe_load(first)["kind"] == "MPIJob"
    assert yaml.safe_load(second)["data"] == {"train.py": "import torch\n"}
    assert list(yaml.safe_load_all(Path("job.yaml").read_text())) == [
        yaml.safe_load(first),
        yaml.safe_load(second),
    ]
    said = capsys.readouterr().err
    assert "creating MPIJob train in namespace ml, context the-cluster\n" in said
    assert "`kubectl get pods -n ml -l training.kubeflow.org/job-name=train`" in said
    assert "`kubectl logs -f -n ml job/train-launcher`" in said
    assert "`kubectl delete -n ml mpijob/train configmap/train-files`" in said


def test_a_trainjobs_runtime_is_created_before_it(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAINJOB, "--namespace", "ml", "-J", "train", "train.py"]) == 0
    created = [yaml.safe_load(text) for text in kubectl.read_text().split("create -f -\n")[1:]]
    assert [each["kind"] for each in created] == ["TrainingRuntime", "TrainJob", "ConfigMap"]
    assert {each["metadata"]["namespace"] for each in created} == {"ml"}
    said = capsys.readouterr().err
    assert "`kubectl logs -f -n ml job/train-launcher-0`" in said
    assert "`kubectl delete -n ml trainjob/train trainingruntime/train configmap/train-files`" in said


@pytest.mark.parametrize(
    ("kind", "says", "hint", "last"),
    [
        ("TrainingRuntime", "no matches for kind", "Kubeflow Trainer v2 is not installed", "create -f -"),
        ("TrainJob", "denied", "", "delete --ignore-not-found trainingruntime/train"),
        ("ConfigMap", "exceeded quota", "", "delete --ignore-not-found trainjob/train trainingruntime/train"),
    ],
)
def test_if_kubectl_refuses_a_trainjob_nothing_is_left_in_the_cluster(
    kind: str, says: str, hint: str, last: str, kubectl: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    # The second line makes sure that the reference to the runtime in the TrainJob doesn't match.
    monkeypatch.setenv("FAILS", f"{kind}\nmetadata")
    monkeypatch.setenv("SAYS", says)
    assert main([*TRAINJOB, "-J", "train", "train.py"]) == 3
    assert hint in capsys.readouterr().err
    calls = [line for line in kubectl.read_text().splitlines() if line.startswith(("create", "delete"))]
    assert calls[-1] == last


def test_a_patch_names_the_document_that_it_changes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job.yaml").write_text("metadata: {labels: {kueue.x-k8s.io/queue-name: training}}\n")
    job = {"name": "node", "template": {"spec": {"template": {"spec": {"nodeSelector": {"disk": "fast"}}}}}}
    patch = {"kind": "TrainingRuntime", "spec": {"template": {"spec": {"replicatedJobs": [job]}}}}
    (here / "runtime.yaml").write_text(yaml.safe_dump(patch))
    patches = ["--patch", "job.yaml", "--patch", "runtime.yaml"]
    assert main([*TRAINJOB, "-J", "train", *patches, "--dry-run", "train.py"]) == 0
    runtime, trainjob, _ = yaml.safe_load_all(capsys.readouterr().out)
    assert trainjob["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
    workers, launcher = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert workers["template"]["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "fast"}
    assert "nodeSelector" not in launcher["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("kind", "says", "hint", "last"),
    [
        ("MPIJob", 'no matches for kind "MPIJob"', "the MPI operator is not installed", "create -f -"),
        ("MPIJob", 'mpijobs "train" already exists', "set another --job-name", "create -f -"),
        ("MPIJob", "dial tcp: connection refused", "`kubectl config get-contexts`", "create -f -"),
        ("MPIJob", 'unknown field "spec.x"', "the MPI operator in this cluster is older", "create -f -"),
        ("ConfigMap", "exceeded quota", "", "delete --ignore-not-found mpijob/train"),
    ],
)
def test_if_kubectl_refuses_a_job_nothing_is_left_in_the_cluster(
    kind: str, says: str, hint: str, last: str, kubectl: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("FAILS", kind)
    monkeypatch.setenv("SAYS", says)
    assert main([*BASE, "-J", "train", "train.py"]) == 3
    error = capsys.readouterr().err
    assert f"kubectl: {says}" in error
    assert hint in error
    calls = [line for line in kubectl.read_text().splitlines() if line.startswith(("create", "delete"))]
    assert calls[-1] == last


def pod(phase: str, **more: Any) -> str:
    """The launcher's pod as kubectl prints it, in a single line."""
    ended = {"state": {"terminated": {"exitCode": more.pop("code")}}} if "code" in more else {"state": {}}
    status = {"phase": phase, "containerStatuses": [{"name": "launcher", **ended}], **more}
    return json.dumps({"items": [{"metadata": {"name": "train-launcher-x"}, "status": status}]})


@pytest.mark.parametrize(
    ("pods", "code", "says"),
    [
        (['{"items": []}', pod("Pending"), pod("Running"), pod("Succeeded", code=0)], 0, "exit code 0\n"),
        ([pod("Running"), pod("Failed", code=5)], 5, "MPIJob train has ended with exit code 5\n"),
        ([pod("Running"), pod("Failed", reason="Evicted")], 1, "has ended with exit code 1 (Evicted)\n"),
        ([pod("Running"), '{"items": []}'], 3, "the launcher of MPIJob train has been deleted"),
    ],
)
def test_a_job_is_followed_to_its_end(
    pods: list[str], code: int, says: str, kubectl: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("cpulaunch.queues.kubernetes.follow.POLL_INTERVAL", 0.01)
    (answers := kubectl.parent / "pods").write_text("\n".join(pods) + "\n")
    monkeypatch.setenv("PODS", str(answers))
    assert main([*BASE, "--follow", "-J", "train", "train.py"]) == code
    out, error = capfd.readouterr()
    assert "epoch 1\n" in out
    assert says in error
    assert ("MPIJob train waits: its workers are not ready" in error) == ("[]" in pods[0])


def test_a_trainjob_is_followed_to_its_end(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cpulaunch.queues.kubernetes.follow.POLL_INTERVAL", 0.01)
    (answers := kubectl.parent / "pods").write_text(
        pod("Failed", code=5).replace('"launcher"', '"node"') + "\n"
    )
    monkeypatch.setenv("PODS", str(answers))
    assert main([*TRAINJOB, "--follow", "-J", "train", "train.py"]) == 5
    assert "TrainJob train has ended with exit code 5\n" in capfd.readouterr().err


def test_following_stops_if_a_waiting_job_is_deleted(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (answers := kubectl.parent / "pods").write_text('{"items": []}\n')
    Path(f"{answers}.deleted").touch()
    monkeypatch.setenv("PODS", str(answers))
    assert main([*BASE, "--follow", "-J", "train", "train.py"]) == 3
    assert 'kubectl: Error: mpijobs "train" not found' in capsys.readouterr().err


def test_a_patch_sets_fields_for_which_there_is_no_option(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = re.search(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / "kubernetes.md").read_text(), re.S)
    assert patch
    (here / "site.yaml").write_text(patch[1])
    job, files = printed(capsys, "-J", "train", "--patch", "site.yaml", "train.py")
    assert job["metadata"] == {"name": "train", "labels": {"kueue.x-k8s.io/queue-name": "training"}}
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    assert worker["nodeSelector"] == {"node.kubernetes.io/instance-type": "m7i.metal"}
    (container,) = worker["containers"]
    assert container["command"] == ["/usr/sbin/sshd", "-De"]
    assert container["imagePullPolicy"] == "Always"
    assert job["spec"]["runPolicy"] == {
        "cleanPodPolicy": "Running",
        "backoffLimit": 0,
        "activeDeadlineSeconds": 86400,
    }
    assert problems(job) == []
    assert list(files) == ["train.py"]


def test_without_kubectl_the_error_suggests_writing_the_job_to_a_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main([*BASE, "train.py"]) == 3
    error = capsys.readouterr().err
    assert "kubectl can't be run: No such file or directory" in error
    assert "use --output F to write the job to a file" in error


def test_the_commands_on_the_page_are_valid(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "examples").mkdir()
    (here / "examples" / "digits.py").write_text((REPOSITORY / "examples" / "digits.py").read_text())
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    commands = re.findall(r"^\$ cpulaunch (submit (?:.*\\\n)*.*)$", page, re.M)
    assert len(commands) > 2
    for each in commands:
        words = [word for word in shlex.split(each.replace("\\\n", " ")) if word != "--dry-run"]
        assert main([*words[:1], "--dry-run", *words[1:]]) == 0
        kind = "TrainingRuntime" if "trainjob" in words else "MPIJob"
        assert yaml.safe_load(capsys.readouterr().out.partition("\n---")[0])["kind"] == kind


def test_the_messages_on_the_page_are_current(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    shown = re.findall(r"^cpulaunch: .*\n", page, re.M)
    Path("digits.py").touch()
    for submit in (BASE, TRAINJOB):
        assert main([*submit, "digits.py"]) == 0
    said = capsys.readouterr().err
    assert re.sub("digits-[0-9a-f]{6}", "digits-1a2b3c", said) == "".join(shown)


def test_the_page_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["submit", "--to", "kubernetes", "--help"])
    said = capsys.readouterr().out
    ours = said.partition("Kubernetes (--to kubernetes or trainjob):")[2].partition("\n\n")[0]
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    options = re.findall(r"^  (--\w+)", ours, re.M)
    assert len(options) > 5
    assert [name for name in options if name not in page] == []
