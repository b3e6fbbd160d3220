"""The fields of kubeflow.org/v2beta1, and the errors of an MPIJob according to them.

Source: kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go, with what its enumerations, defaults and
pkg/apis/kubeflow/validation/validation.go allow.  Pods are Kubernetes' own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Check = Any
"""A mapping of fields to checks, a set of the values allowed, a type, or "pod template"."""

TEMPLATE = "pod template"
REPLICA = {"replicas": int, "restartPolicy": {"Never", "OnFailure"}, "template": TEMPLATE}

MPIJOB: dict[str, Check] = {
    "apiVersion": {"kubeflow.org/v2beta1"},
    "kind": {"MPIJob"},
    "metadata": {"name": str, "namespace": str, "labels": dict, "annotations": dict},
    "spec": {
        "slotsPerWorker": int,
        "runLauncherAsWorker": bool,
        "runPolicy": {
            "cleanPodPolicy": {"None", "Running", "All"},
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "schedulingPolicy": {
                "minAvailable": int,
                "queue": str,
                "minResources": dict,
                "priorityClass": str,
                "scheduleTimeoutSeconds": int,
            },
            "suspend": bool,
            "managedBy": {"kubeflow.org/mpi-operator", "kueue.x-k8s.io/multikueue"},
        },
        "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
        "sshAuthMountPath": str,
        "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
        "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
    },
}

REQUIRED = (
    "metadata.name",
    "spec.runPolicy.cleanPodPolicy",
    *(f"spec.mpiReplicaSpecs.{kind}.{field}" for kind in ("Launcher", "Worker") for field in REPLICA),
)


def problems(job: dict[str, Any]) -> list[str]:
    """Return the errors for which the operator's API would refuse a document, except errors in pods."""
    found = [*_wrong(job, MPIJOB, "")]
    for path in REQUIRED:
        here: Any = job
        for part in path.split("."):
            here = here.get(part, {}) if isinstance(here, dict) else {}
        if here in ({}, None):
            found.append(f"{path} is missing")
    replicas = job["spec"]["mpiReplicaSpecs"]
    if replicas["Launcher"]["replicas"] != 1:
        found.append("there must be one launcher")
    longest = f"{job['metadata']['name']}-worker-{replicas['Worker']['replicas'] - 1}"
    if not re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", longest):
        found.append(f"{longest} is no DNS label")
    return found


def templates(job: dict[str, Any]) -> dict[str, Any]:
    """The pod templates, by the replica's kind."""
    return {kind: replica["template"] for kind, replica in job["spec"]["mpiReplicaSpecs"].items()}


def _wrong(value: Any, check: Check, path: str) -> Iterator[str]:
    if check == TEMPLATE:
        return
    if isinstance(check, set):
        if value not in check:
            yield f"{path}: {value!r}"
    elif isinstance(check, type):
        if type(value) is not check or (check is int and value < 0):
            yield f"{path}: {value!r}"
    elif not isinstance(value, dict):
        yield f"{path}: {value!r}"
    else:
        for name, inner in value.items():
            where = f"{path}.{name}".strip(".")
            yield from _wrong(inner, check[name], where) if name in check else [f"{where} is unknown"]
