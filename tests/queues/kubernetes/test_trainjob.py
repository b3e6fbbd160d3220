"""TrainJobs and their runtimes: golden texts, and their fields by the schemas that Kubeflow Trainer publishes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cpulaunch.queues.kubernetes.pods import Job, as_yaml
from cpulaunch.queues.kubernetes.trainjob import TRAINJOB
from queues.kubernetes.test_mpijob import JOBS

GOLDEN = Path(__file__).parent / "golden"


def problems(document: dict[str, Any]) -> str:
    """The errors and unknown fields of a document, by Trainer's models."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    model = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }[document["kind"]]
    try:
        known = model.from_dict(document)
    except ValueError as e:
        return str(e)
    return "" if known.to_dict() == document else f"unknown: {document}"


def test_a_job_equals_the_golden_text() -> None:
    path = GOLDEN / "trainjob.yaml"
    text = as_yaml(TRAINJOB.documents(JOBS["everything"]))
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", JOBS)
def test_runtime_and_job_fit_the_published_schemas(name: str) -> None:
    runtime, job, *_ = TRAINJOB.documents(JOBS[name])
    assert problems(runtime) == ""
    assert problems(job) == ""
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


@pytest.mark.parametrize("version", ["1.25", "1.37"])
@pytest.mark.parametrize("name", JOBS)
def test_jobs_and_pods_fit_kubernetes_own_schema(name: str, version: str) -> None:
    runtime, *_ = TRAINJOB.documents(JOBS[name])
    for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **each["template"]}
        job["metadata"] = {"name": "job", **each["template"].get("metadata", {})}
        kubernetes_validate.validate(job, version, strict=True)


def test_trainer_finds_the_parts_that_it_changes() -> None:
    """Trainer's plug-in for MPI looks for these names (pkg/constants, plugins/mpi)."""
    runtime, job, *_ = TRAINJOB.documents(JOBS["everything"])
    assert runtime["spec"]["mlPolicy"]["mpi"]["mpiImplementation"] == "OpenMPI"
    workers, launcher = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    for each, name in ((workers, "node"), (launcher, "launcher")):
        assert each["name"] == name
        assert [c["name"] for c in each["template"]["spec"]["template"]["spec"]["containers"]] == ["node"]
    assert launcher["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2


@pytest.mark.parametrize(("length", "workers", "longest"), [(44, 1, None), (45, 1, 44), (45, 1001, 44)])
def test_names_leave_room_for_the_pods_names(length: int, workers: int, longest: int | None) -> None:
    found = TRAINJOB.why_not_a_name("a" * length, workers)
    assert found == (longest and f"it has {length} characters; the maximum is {longest}")


def test_the_documents_can_be_created_in_this_order() -> None:
    kinds = [each["kind"] for each in yaml.safe_load_all(as_yaml(TRAINJOB.documents(JOBS["everything"])))]
    assert kinds == ["TrainingRuntime", "TrainJob", "ConfigMap"]
    without_files = Job("train", "train:1", ["cpulaunch", "run", "/app/train.py"])
    assert [each["kind"] for each in TRAINJOB.documents(without_files)] == kinds[:2]
