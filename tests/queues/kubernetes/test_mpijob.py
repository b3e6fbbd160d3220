"""MPIJobs: golden texts, their fields by the operator's types, and their pods by Kubernetes' own schema."""

from __future__ import annotations

import os
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from cpulaunch.queues.kubernetes.mpijob import MPIJOB
from cpulaunch.queues.kubernetes.pods import Job, as_yaml, bytes_of, half_of
from queues.kubernetes.fields import problems, templates

GOLDEN = Path(__file__).parent / "golden"
SCRIPT = 'import torch\n\nprint("it\'s done", "\\t", torch.__version__)  # ünd\n'
RUN = ("cpulaunch", "run")

JOBS = {
    "whole-nodes": Job("train", "train:1", [*RUN, "-m", "train"], mpi="MPICH"),
    "everything": Job(
        "train", "train:1", [*RUN, "/app/train.py", "$(date)", "a: b", ""], namespace="ml", mpi="OpenMPI",
        workers=2, slots=2, cpus=1, memory="1500M", variables={"CPULAUNCH_TRAINING_PRECISION": "fp32", "CCL_WORKER_COUNT": "4"},
        secrets=["tokens"], volumes={"/data": "data", "/home/mpiuser/runs": "runs"},
        files={"train.py": SCRIPT, "cpulaunch.yaml": "training:\n  precision: fp32\n"},
    ),
}  # fmt: skip


def test_a_job_equals_the_golden_text() -> None:
    path = GOLDEN / "mpijob.yaml"
    text = as_yaml(MPIJOB.documents(JOBS["everything"]))
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert list(yaml.safe_load_all(text)) == MPIJOB.documents(JOBS["everything"])


def test_a_job_of_whole_nodes_sets_no_resources_for_its_workers() -> None:
    job, *maps = MPIJOB.documents(JOBS["whole-nodes"])
    (worker,) = templates(job)["Worker"]["spec"]["containers"]
    assert "resources" not in worker
    assert "slotsPerWorker" not in job["spec"]
    assert maps == []


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_only_fields_of_v2beta1(name: str) -> None:
    job, *_ = MPIJOB.documents(JOBS[name])
    assert problems(job) == []


@pytest.mark.parametrize("version", ["1.25", "1.37"])
@pytest.mark.parametrize("name", JOBS)
def test_pods_and_config_maps_fit_kubernetes_own_schema(name: str, version: str) -> None:
    job, *maps = MPIJOB.documents(JOBS[name])
    for template in templates(job).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        kubernetes_validate.validate(pod, version, strict=True)
    for each in maps:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize(
    ("name", "workers", "why"),
    [
        ("a" * 54, 1, None),
        ("a" * 55, 1, "it has 55 characters; the maximum is 54"),
        ("a" * 54, 101, "it has 54 characters; the maximum is 52"),
        ("4-nodes", 1, "only a-z, 0-9 and - are valid"),
        ("Train", 1, "only a-z, 0-9 and - are valid"),
        ("train-", 1, "only a-z, 0-9 and - are valid"),
        ("", 1, "only a-z, 0-9 and - are valid"),
    ],
)
def test_names_are_valid_for_services_and_hosts(name: str, workers: int, why: str | None) -> None:
    found = MPIJOB.why_not_a_name(name, workers)
    assert found == why or (why and found and found.startswith(why))


@pytest.mark.parametrize(
    ("quantity", "size"),
    [("64Gi", 64 << 30), ("1.5Gi", 3 << 29), ("64G", 64 * 10**9), ("100k", 100_000), ("7", 7), ("64GB", None),
     ("64gi", None), ("-1Gi", None), ("1e9", None), ("Gi", None), ("", None), ("1 Gi", None)],
)  # fmt: skip
def test_quantities(quantity: str, size: int | None) -> None:
    assert bytes_of(quantity) == size


@pytest.mark.parametrize(
    ("memory", "half"), [("64Gi", "32Gi"), ("3Gi", "1536Mi"), ("2Gi", "1Gi"), ("64G", "30517Mi")]
)
def test_shared_memory_is_half_of_a_workers_memory(memory: str, half: str) -> None:
    assert half_of(memory) == half


def test_only_whole_cpus_with_equal_limits_make_a_pod_guaranteed() -> None:
    """The kubelet's static policy requires this.

    The launcher's pod is also guaranteed, so no pod is evicted first.
    """
    job, *_ = MPIJOB.documents(JOBS["everything"])
    for template in templates(job).values():
        for container in template["spec"]["containers"]:
            resources = container["resources"]
            assert resources["limits"] == resources["requests"]
            assert resources["limits"].keys() == {"cpu", "memory"}
            assert resources["limits"]["cpu"].isdigit()
